"""Tests in a process of their own, whose engine has the fake devices: an engine keeps its devices until it ends.

    @on_fake_gpus
    def test_something(gpus: GpuSession, n_slots): ...

runs there, as if it were called here: what it raises arrives, and what it leaves behind makes it fail. The fixture
`gpu_process` of the folder's conftest is where.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib.util
import inspect
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cache, wraps
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from expertier.engine_adapter.llama_cpp import LoadedEngine
from expertier.tiers.host_budget import process_budget
from fake_ggml_gpu.library import FakeGpus

_HANG_S = 150


@dataclass(frozen=True)
class Setup:
    """What the process loads, and how many devices it has."""

    libraries: Sequence[Path]
    proxy: Path
    host: Path
    fake: Path
    n_devices: int
    folder: Path
    """For files that tests make and share."""


@dataclass(frozen=True)
class GpuSession:
    """The engine with its fake devices, inside of that process."""

    engine: LoadedEngine
    fakes: FakeGpus
    folder: Path


class GpuProcess:
    """The process, seen from outside. One that a test ends is replaced by a new one for the next test."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._pool: ProcessPoolExecutor | None = None

    def call(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
        """Return what a function of an importable module returns there, given the session first."""
        return self._submit(_call, function, arguments, named)

    def run_test(self, file: str, name: str, arguments: dict[str, Any]) -> None:
        """Run the test `name` of a file; it gets the session as `gpus`."""
        self._submit(_run_test, file, name, arguments)

    def close(self) -> None:
        """End the process."""
        if self._pool is not None:
            self._pool.shutdown()

    def _submit(self, function: Callable[..., Any], *arguments: Any) -> Any:
        if self._pool is None:
            spawn = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(1, spawn, initializer=_start, initargs=(self._setup,))
        try:
            return self._pool.submit(function, *arguments).result()
        except BrokenProcessPool as error:
            self._pool = None
            raise AssertionError(
                "the process of the fake devices ended: something touched device memory by its address, an assertion "
                f"of the engine failed, or the test took more than {_HANG_S} s; its last words are above"
            ) from error


def on_fake_gpus(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test in the process of the fake devices; its first parameter, `gpus`, is a GpuSession."""
    signature = inspect.signature(test)
    first, *others = signature.parameters.values()
    assert first.name == "gpus", f"{test.__name__} takes {first.name} first"

    @wraps(test)
    def run(gpu_process: GpuProcess, **arguments: Any) -> None:
        gpu_process.run_test(inspect.getfile(test), test.__name__, arguments)

    run.__dict__["on_fake_gpus"] = test
    run.__dict__["__signature__"] = signature.replace(parameters=[first.replace(name="gpu_process"), *others])
    return run


_session: GpuSession | None = None


def _start(setup: Setup) -> None:
    global _session  # one a process, as the engine is
    faulthandler.enable()
    engine = LoadedEngine.load(setup.libraries, setup.proxy, setup.host)
    fakes = FakeGpus.load(engine, setup.fake, n_devices=setup.n_devices)
    _session = GpuSession(engine, fakes, setup.folder)


def _call(function: Callable[..., Any], arguments: Sequence[Any], named: dict[str, Any]) -> Any:
    assert _session is not None
    fakes = _session.fakes
    faulthandler.dump_traceback_later(_HANG_S, exit=True)
    process_budget.cache_clear()
    fakes.reset()
    fakes.take_faults()
    before = [device.live() for device in fakes.devices]
    try:
        result = function(_session, *arguments, **named)
    finally:
        fakes.reset()
        faulthandler.cancel_dump_traceback_later()
    gc.collect()
    faults = fakes.take_faults()
    assert not faults, f"the devices complained:\n{faults}"
    after = [device.live() for device in fakes.devices]
    assert after == before, f"left on the devices: {after}, before: {before}"
    return result


def _run_test(file: str, name: str, arguments: dict[str, Any]) -> None:
    try:
        _call(_module(file).__dict__[name].__dict__["on_fake_gpus"], (), arguments)
    except pytest.fail.Exception as failure:  # which does not travel
        raise AssertionError(str(failure)) from failure


@cache
def _module(file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"on_fake_gpus_{Path(file).stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
