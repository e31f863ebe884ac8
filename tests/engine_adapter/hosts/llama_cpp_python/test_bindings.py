"""llama-cpp-python is found, or an error says what is wrong with it: missing, broken, of another version or layout."""

from __future__ import annotations

import ctypes as ct
import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine_runs.drop_in.stand_ins import HERE, forget_llama
from expertier.engine_adapter.build.engine import Engine
from expertier.engine_adapter.build.pins import LLAMA_CPP_PYTHON
from expertier.engine_adapter.build.plugin import require_pinned
from expertier.engine_adapter.hosts.llama_cpp_python import bindings
from expertier.engine_adapter.hosts.llama_cpp_python.in_use import libraries_in_use
from expertier.engine_adapter.llama_cpp import LoadedEngine
from expertier.errors import EngineMismatchError, EngineMissingError


def test_it_is_not_installed(monkeypatch):
    forget_llama(monkeypatch)
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(EngineMissingError, match=r"not installed: pip install 'llama-cpp-python==0\.3\.36'"):
        importlib.import_module(HERE).Llama  # noqa: B018


def test_our_package_has_nothing_else():
    with pytest.raises(AttributeError, match="Lama"):
        importlib.import_module(HERE).Lama  # noqa: B018


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ModuleNotFoundError("No module named 'jinja2'", name="jinja2"), "lacks its dependency jinja2"),
        (RuntimeError("Failed to load shared library"), "cannot be imported: Failed to load"),
        (FileNotFoundError("Shared library with base name 'llama' not found"), "cannot be imported: Shared"),
    ],
)
def test_it_does_not_import(monkeypatch, error, says):
    def fail(_name):
        raise error

    monkeypatch.setattr(LoadedEngine, "_loaded", None)
    monkeypatch.setattr(bindings.importlib, "import_module", fail)
    with pytest.raises(EngineMissingError, match=says) as caught:
        bindings.import_llama_cpp()
    assert "pip install" in str(caught.value)


def test_another_version_is_refused(package):
    package.__version__ = "0.3.35"
    with pytest.raises(EngineMismatchError, match=r"0\.3\.35 is installed .* known for 0\.3\.36 only"):
        bindings.import_llama_cpp()


def test_it_lacks_a_function(package):
    del package.llama_cpp.llama_memory_seq_rm
    with pytest.raises(EngineMismatchError, match="lacks llama_memory_seq_rm; reinstall"):
        bindings.bindings_of_llama_h(package)


def test_another_engine_runs_here(monkeypatch):
    monkeypatch.delitem(sys.modules, "llama_cpp", raising=False)
    other = SimpleNamespace(library_paths=(Path("/somewhere/xllamacpp.abi3.so"),))
    monkeypatch.setattr(LoadedEngine, "_loaded", other)
    with pytest.raises(EngineMismatchError, match="already runs the engine /somewhere/xllamacpp"):
        bindings.import_llama_cpp()


def test_a_library_without_llama_in_it(package):
    with pytest.raises(EngineMismatchError, match="LLAMA_CPP_LIB_PATH"):
        bindings.find_library(package.llama_cpp)


def test_the_files_of_libraries():
    assert libraries_in_use(ct.CDLL("libc.so.6"), ["printf", "no_such_thing", "fopen"])[0].name.startswith(
        "libc"
    )
    assert libraries_in_use(ct.CDLL("libc.so.6"), ["no_such_thing"]) == ()


def test_no_hash_is_known_of_a_library_that_pip_compiles():
    require_pinned(Engine("llama-cpp-python", "0.3.36", (Path("/x"),), "0" * 64, pin=LLAMA_CPP_PYTHON))
    with pytest.raises(EngineMismatchError):
        require_pinned(Engine("llama-cpp-python", "0.3.35", (Path("/x"),), "0" * 64))


def test_the_layout_of_the_parameters_is_compared(package):
    engine = Engine("llama-cpp-python", "0.3.36", (Path("/x"),), "", pin=LLAMA_CPP_PYTHON)
    same = {"devices": None, "n_gpu_layers": -1, "use_extra_bufts": True}
    bindings.check_layout(package.llama_cpp, {"model": same}, engine)
    with pytest.raises(EngineMismatchError, match=r"n_gpu_layers: recorded 0, now -1"):
        bindings.check_layout(package.llama_cpp, {"model": {**same, "n_gpu_layers": 0}}, engine)
    with pytest.raises(EngineMismatchError, match=r"no_host: recorded False, missing"):
        bindings.check_layout(package.llama_cpp, {"model": {**same, "no_host": False}}, engine)
