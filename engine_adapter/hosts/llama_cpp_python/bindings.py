"""llama-cpp-python as an engine: imported, checked, and loaded with our plugin for it.

Its library cannot be pinned by a hash, because it is compiled where it is installed. Instead its version is checked,
whose source package holds the headers. These headers are then compared with ggml's version and interface, with the
self-test, with every default parameter, and with llama_model_params as llama-cpp-python's own Python lays it out.
"""

from __future__ import annotations

import ctypes as ct
import importlib
import sys
import threading
from typing import Any

from expertier.engine_adapter.build.defaults import Defaults, Value, differences
from expertier.engine_adapter.build.engine import Engine
from expertier.engine_adapter.build.hashing import hash_files
from expertier.engine_adapter.build.pins import LLAMA_CPP_PYTHON
from expertier.engine_adapter.build.plugin import check_defaults, ensure_plugin
from expertier.engine_adapter.build.progress import Progress, silent
from expertier.engine_adapter.hosts.llama_cpp_python.in_use import libraries_in_use
from expertier.engine_adapter.llama_cpp import LoadedEngine
from expertier.errors import EngineMismatchError, EngineMissingError
from expertier.interrupts import interrupts_deferred

INSTALL = f"pip install '{LLAMA_CPP_PYTHON.requirement}'"

_NEEDED = (
    "llama_model_load_from_file",
    "llama_model_params",
    "llama_model_default_params",
    "llama_decode",
    "llama_synchronize",
    "llama_get_memory",
    "llama_memory_seq_rm",
    "llama_memory_seq_pos_max",
    "llama_memory_clear",
    "llama_log_callback",
    "llama_log_get",
    "llama_log_set",
)
"""The names that we use of the module that binds llama.h."""

_ONE_SYMBOL_A_LIBRARY = ("ggml_init", "ggml_backend_cpu_init", "ggml_backend_load", "llama_decode")
"""One symbol of each library, ggml-base, ggml-cpu, ggml and llama: dependencies first."""

_opening = threading.Lock()


def import_llama_cpp() -> Any:
    """Import llama-cpp-python and return it.

    Raises:
        EngineMissingError: it is not installed, or does not import. EngineMismatchError: it is another version than
            the one whose headers are known, or this process runs another engine already.
    """
    other = LoadedEngine.current()
    if other is not None and "llama_cpp" not in sys.modules:
        raise EngineMismatchError(
            f"this process already runs the engine {other.library_paths[-1]}, whose symbols llama-cpp-python would "
            "find in place of its own: use a process of its own for each engine"
        )
    try:
        module: Any = importlib.import_module("llama_cpp")
    except ModuleNotFoundError as error:
        missing = "is not installed" if error.name == "llama_cpp" else f"lacks its dependency {error.name}"
        raise EngineMissingError(
            f"llama-cpp-python {missing}: {INSTALL}, or pip install 'expertier[llama-cpp-python]'"
        ) from error
    except (ImportError, OSError, RuntimeError) as error:
        raise EngineMissingError(
            f"llama-cpp-python is installed, but cannot be imported: {error}; reinstall it: "
            f"pip install --force-reinstall '{LLAMA_CPP_PYTHON.requirement}'"
        ) from error
    version = str(getattr(module, "__version__", "unknown"))
    if version != LLAMA_CPP_PYTHON.version:
        raise EngineMismatchError(
            f"llama-cpp-python {version} is installed ({getattr(module, '__file__', None)}); headers are known for "
            f"{LLAMA_CPP_PYTHON.version} only, and those of another version may lay its structures out otherwise: "
            f"{INSTALL}"
        )
    return module


def open_bindings(progress: Progress = silent) -> LoadedEngine:
    """Load our plugin into the llama.cpp that llama-cpp-python has loaded, building it the first time.

    Raises:
        EngineError: as `import_llama_cpp`, and where the library is not what its version says, or the plugin cannot
            be built.
    """
    llama_h = bindings_of_llama_h(import_llama_cpp())
    engine = find_library(llama_h)
    plugin = ensure_plugin(engine, progress)
    with interrupts_deferred(), _opening:
        callback, data = llama_h.llama_log_callback(), ct.c_void_p()
        llama_h.llama_log_get(ct.byref(callback), ct.byref(data))
        try:
            loaded = LoadedEngine.load(engine.libraries, plugin.proxy_path, plugin.host_path)
            defaults = loaded.defaults()
            check_defaults(plugin.info.defaults, defaults, engine)
            check_layout(llama_h, defaults, engine)
            assert loaded.proxy  # its first use registers it, here on one thread
        finally:
            llama_h.llama_log_set(
                callback, data
            )  # loading has redirected the engine's log, which llama-cpp-python is to show
    return loaded


def bindings_of_llama_h(package: Any) -> Any:
    """Return the package's module that binds llama.h. Errors: EngineMismatchError, naming what it lacks."""
    module = getattr(package, "llama_cpp", None)
    lacking = [name for name in _NEEDED if not hasattr(module, name)]
    if lacking or not isinstance(getattr(module, "_lib", None), ct.CDLL):
        raise EngineMismatchError(
            f"{getattr(package, '__file__', 'llama_cpp')} says that it is {LLAMA_CPP_PYTHON.requirement}, but lacks "
            f"{', '.join(lacking) or 'its library'}; reinstall it: pip install --force-reinstall "
            f"'{LLAMA_CPP_PYTHON.requirement}'"
        )
    return module


def find_library(llama_h: Any) -> Engine:
    """Describe the llama.cpp that llama-cpp-python has loaded."""
    libraries = libraries_in_use(llama_h._lib, _ONE_SYMBOL_A_LIBRARY)
    if not libraries:
        raise EngineMismatchError(
            f"the library that llama-cpp-python loaded, {llama_h._lib._name}, has none of "
            f"{', '.join(_ONE_SYMBOL_A_LIBRARY)}: unset LLAMA_CPP_LIB_PATH if it is set, or reinstall it"
        )
    folder = libraries[-1].parent
    backends = set(folder.glob("libggml-*.so"))  # the hash covers all of them, loaded or not
    inside = {path for path in libraries if path.parent == folder}
    return Engine(
        LLAMA_CPP_PYTHON.package,
        LLAMA_CPP_PYTHON.version,
        libraries,
        hash_files(inside | backends, folder),
        pin=LLAMA_CPP_PYTHON,
    )


def check_layout(llama_h: Any, defaults: Defaults, engine: Engine) -> None:
    """Compare Python's layout of llama_model_params with that of the headers, by the default values of its fields.

    Our host library reads the structure that `llama_cpp.Llama` has filled in. Errors: EngineMismatchError.
    """
    params = llama_h.llama_model_default_params()
    found = {name: _plain(getattr(params, name)) for name, *_ in params._fields_}
    lines = differences({"model": defaults["model"]}, {"model": found})
    if lines:
        raise EngineMismatchError(
            f"llama-cpp-python lays llama_model_params out otherwise than the headers of {engine}:\n  "
            + "\n  ".join(lines)
            + f"\n{engine.remedy}"
        )


def _plain(value: Any) -> Value:
    """Return a field's value as the host library prints it."""
    if value is None or isinstance(value, bool | int | float):
        return value
    return "set" if value else None
