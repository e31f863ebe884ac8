"""Stand-ins for llama-cpp-python, for the engine and for its models, under the drop-in's own class."""

from __future__ import annotations

import ctypes as ct
import importlib
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from expertier.engine_adapter.build.pins import LLAMA_CPP_PYTHON
from expertier.engine_adapter.hosts.llama_cpp_python import bindings

HERE = "expertier.engine_adapter.hosts.llama_cpp_python"


class Params(ct.Structure):
    """Stands in for llama_model_params."""

    _fields_: ClassVar = [
        ("devices", ct.c_void_p),
        ("n_gpu_layers", ct.c_int32),
        ("use_extra_bufts", ct.c_bool),
    ]


def make_llama_h() -> types.ModuleType:
    """Stands in for the module that binds llama.h: it has every function, and none of them does anything."""
    module: Any = types.ModuleType("llama_cpp.llama_cpp")
    for name in bindings._NEEDED:
        setattr(module, name, lambda *_: None)
    module.loaded = []
    module.llama_model_load_from_file = lambda path, params: module.loaded.append((path, params)) or 77
    module.llama_model_default_params = lambda: Params(n_gpu_layers=-1, use_extra_bufts=True)
    module._lib = ct.CDLL("libc.so.6")
    return module


class StockLlama:
    """Stands in for llama_cpp.Llama: loads a model in the same way, and remembers its arguments."""

    loads = True

    def __init__(self, model_path: str, **arguments: Any) -> None:
        self._stack = SimpleNamespace(close=lambda: None)
        self.model_path = model_path
        self.arguments = arguments
        if self.loads:
            package: Any = sys.modules["llama_cpp"]
            package.llama_cpp.llama_model_load_from_file(model_path.encode(), Params())
        self._ctx = SimpleNamespace(ctx=1)
        self._requires_eval = False

    def close(self) -> None:
        self._stack.close()

    def __del__(self) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {"model_path": self.model_path, **self.arguments}


def make_package() -> Any:
    """Stands in for the package llama_cpp, of the pinned version."""
    module: Any = types.ModuleType("llama_cpp")
    module.__version__ = LLAMA_CPP_PYTHON.version
    module.__file__ = "/somewhere/llama_cpp/__init__.py"
    module.llama_cpp = make_llama_h()
    module.Llama = type("Llama", (StockLlama,), {})
    return module


def forget_llama(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the module with our class be imported anew, and be forgotten after the test."""
    monkeypatch.delitem(sys.modules, f"{HERE}.llama", raising=False)
    monkeypatch.delattr(importlib.import_module(HERE), "llama", raising=False)
    monkeypatch.setitem(
        sys.modules, f"{HERE}.llama", None
    )  # so that what is imported goes when this is undone
    monkeypatch.delitem(sys.modules, f"{HERE}.llama")


class ToyEngine:
    """Stands in for the loaded engine, which has the CPU only."""

    proxy = SimpleNamespace(
        expertier_proxy_device_name=lambda index: b"CPU" if index == 0 else None,
        expertier_device_is_host=lambda _: 1,
    )

    def stock_devices(self) -> None:
        return None


class ToyModel:
    """Stands in for the model that is opened with tiers."""

    opened: ClassVar[list[dict[str, Any]]] = []

    def __init__(self) -> None:
        self.binding = SimpleNamespace(take_error=lambda: ("", None))
        self.closed = 0

    @classmethod
    def open(cls, engine: Any, path: Path, **options: Any) -> ToyModel:
        cls.opened.append({"engine": engine, "path": path, **options})
        return cls()

    def hand_over(self) -> int:
        return 55

    def close(self) -> None:
        self.closed += 1
