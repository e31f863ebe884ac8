"""The drop-in over the stand-ins of `engine_runs.drop_in.stand_ins`."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from engine_runs.drop_in.stand_ins import HERE, ToyEngine, ToyModel, forget_llama, make_package
from engine_runs.tiered_runs import write_small_model


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A package llama_cpp of the pinned version, to be imported in place of a real one."""
    module = make_package()
    monkeypatch.setitem(sys.modules, "llama_cpp", module)
    forget_llama(monkeypatch)
    return module


@pytest.fixture
def drop_in(package: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module with our class, over the stand-ins."""
    monkeypatch.setattr(package.llama_cpp, "llama_get_memory", lambda _: None)
    for variable in [name for name in os.environ if name.startswith("MOE_")]:
        monkeypatch.delenv(variable)
    module = importlib.import_module(f"{HERE}.llama")
    monkeypatch.setattr(module, "open_bindings", lambda _progress: ToyEngine())
    monkeypatch.setattr(module, "LlamaModel", ToyModel)
    monkeypatch.setattr(ToyModel, "opened", [])
    return module


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_small_model(tmp_path, "F32")
