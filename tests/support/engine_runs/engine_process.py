"""Tests in a process of their own, which has an engine: an engine keeps its devices until it ends.

    @in_process("gpu_process")
    def test_something(gpus: GpuSession, n_slots): ...

runs there, as if it were called here: what it raises arrives, a skip is one here, and what it leaves behind makes it
fail. The fixture of that name is where.
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
from contextlib import AbstractContextManager
from functools import cache, wraps
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, Protocol, TypeVar

import pytest

from expertier.tiers.host_pool.budget import process_budget

HANG_S = 240
_INNER = "in_process"


class Session(Protocol):
    """An engine with its devices, inside of that process."""

    def checked(self) -> AbstractContextManager[None]:
        """Have the devices as new inside the block, and nothing left on them after it."""


SetupT = TypeVar("SetupT")


class EngineProcess(Generic[SetupT]):
    """The process, seen from outside. One that a test ends is replaced by a new one for the next test."""

    def __init__(self, start: Callable[[SetupT], Session], setup: SetupT, why_it_ended: str) -> None:
        """Have `start(setup)` make the session there; `why_it_ended` is what to say of a process that is gone."""
        self._start = start
        self._setup = setup
        self._why_it_ended = why_it_ended
        self._pool: ProcessPoolExecutor | None = None

    def call(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
        """Return what a function of an importable module returns there, given the session first."""
        return self._submit(_call, function, arguments, named)

    def run_test(self, file: str, name: str, arguments: dict[str, Any]) -> None:
        """Run the test `name` of a file; it gets the session as its first argument."""
        if reason := self._submit(_run_test, file, name, arguments):
            pytest.skip(reason)

    def close(self) -> None:
        """End the process."""
        if self._pool is not None:
            self._pool.shutdown()

    def _submit(self, function: Callable[..., Any], *arguments: Any) -> Any:
        if self._pool is None:
            spawn = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(
                1, spawn, initializer=_begin, initargs=(self._start, self._setup)
            )
        try:
            return self._pool.submit(function, *arguments).result(2 * HANG_S)
        except BrokenProcessPool as error:
            self._pool = None
            raise AssertionError(
                f"the process with the engine ended: {self._why_it_ended}, or the test took more than {HANG_S} s; its "
                "last words are above"
            ) from error


def in_process(fixture: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test in the process that `fixture` is; its first parameter is the session there."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(test)
        first, *others = signature.parameters.values()

        @wraps(test)
        def run(**arguments: Any) -> None:
            process = arguments.pop(fixture)
            process.run_test(inspect.getfile(test), test.__name__, arguments)

        run.__dict__[_INNER] = test
        run.__dict__["__signature__"] = signature.replace(parameters=[first.replace(name=fixture), *others])
        return run

    return decorate


_session: Session | None = None


def _begin(start: Callable[[SetupT], Session], setup: SetupT) -> None:
    global _session  # one a process, as the engine is
    faulthandler.enable()
    _session = start(setup)


def _call(function: Callable[..., Any], arguments: Sequence[Any], named: dict[str, Any]) -> Any:
    assert _session is not None
    process_budget.cache_clear()
    with _session.checked():
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        try:
            result = function(_session, *arguments, **named)
        finally:
            faulthandler.cancel_dump_traceback_later()
        gc.collect()
    return result


def _run_test(file: str, name: str, arguments: dict[str, Any]) -> str:
    """Run it; returns why it was skipped, or nothing."""
    try:
        _call(_module(file).__dict__[name].__dict__[_INNER], (), arguments)
    except pytest.skip.Exception as skipped:  # neither of these travels
        return str(skipped)
    except pytest.fail.Exception as failure:
        raise AssertionError(str(failure)) from failure
    return ""


@cache
def _module(file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"in_process_{Path(file).stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
