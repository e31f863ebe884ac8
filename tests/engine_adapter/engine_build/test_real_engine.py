"""The pins against the real packages: these tests fetch source packages and compile, once a cache."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from expertier.engine_adapter.build.compiler import compile_libraries, find_compiler
from expertier.engine_adapter.build.engine import Engine
from expertier.engine_adapter.build.header_root import list_headers, read_api_version
from expertier.engine_adapter.build.headers import ensure_headers
from expertier.engine_adapter.build.pins import LLAMA_CPP_PYTHON, XLLAMACPP, EnginePin
from expertier.engine_adapter.build.plugin import Plugin, installed_sources

PINS = [XLLAMACPP, LLAMA_CPP_PYTHON]


@pytest.fixture(autouse=True)
def cache(engine_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run's shared cache instead of an empty one."""
    monkeypatch.setenv("EXPERTIER_CACHE_DIR", str(engine_cache))
    return engine_cache


def test_the_installed_wheel_is_the_pinned_one(engine: Engine) -> None:
    assert engine.pin is XLLAMACPP
    assert engine.is_pinned


@pytest.mark.parametrize("pin", PINS, ids=lambda pin: pin.package)
def test_the_pinned_headers_are_of_the_pinned_api(pin: EnginePin) -> None:
    headers = ensure_headers(pin)
    assert read_api_version(headers) == pin.api_version
    assert "ggml-impl.h" in {path.name for path in list_headers(headers)}


@pytest.mark.parametrize("pin", PINS, ids=lambda pin: pin.package)
@pytest.mark.parametrize("structure", ["model", "context"])
def test_every_field_of_the_default_parameters_is_recorded(pin: EnginePin, structure: str) -> None:
    header = (ensure_headers(pin) / "include/llama.h").read_text()
    body = re.search(rf"struct llama_{structure}_params {{(.*?)\n    }};", header, re.DOTALL)
    assert body is not None
    declarations = re.sub(r"//.*", "", body[1]).split(";")
    fields = [declaration.split()[-1].lstrip("*") for declaration in declarations if declaration.strip()]
    assert fields == list(pin.defaults[structure])


@pytest.mark.deep
def test_the_sources_compile_against_backend_api_2_too(tmp_path: Path) -> None:
    headers = ensure_headers(LLAMA_CPP_PYTHON)
    proxy, host = compile_libraries(find_compiler(), installed_sources(), headers, tmp_path)
    assert proxy.is_file()
    assert host.is_file()


def test_the_plugin_of_the_installed_engine_passed_its_selftest(plugin: Plugin) -> None:
    assert plugin.info.ggml_version == XLLAMACPP.ggml_version
    assert plugin.info.api_version == XLLAMACPP.api_version
    assert plugin.info.devices
