"""Interrupts, SIGINT and SIGTERM: deferred while work runs that must not end half-way, and raised at its end.

CPython runs signal handlers in the main thread, between two instructions of the Python code that runs there, and the
usual handlers raise. Code that holds a resource from one instruction to another runs in a region:

    with interrupts_deferred():       a signal is noted from here on
        ...
        raise_pending()               a wait ends early, where nothing is half done
        ...
                                      the end: KeyboardInterrupt, or Terminated, if one was noted

Code that hands a resource over to its caller needs more, as the end of the region may raise: it undoes its work in
an `except` around the region.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dis import opmap
from functools import wraps
from importlib import import_module
from types import FrameType, TracebackType
from typing import Any, Concatenate, NoReturn, ParamSpec, Protocol, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")
_O = TypeVar("_O", bound="Opened")

POLL_INTERVAL_S = 0.05
"""How long the main thread waits at most before it looks for an interrupt."""

_AFTER_YIELD_FROM = 2
"""RESUME's argument after a `yield from`; at a function's beginning it is 0."""

# `signal` wraps this module in Python code, which looks enums up and takes ten times as long.
_signal: Any = import_module("_signal")


class Terminated(KeyboardInterrupt):
    """SIGTERM has asked the process to end; code that does not tell the two apart handles this as it handles Ctrl-C."""


def raise_terminated(_number: int, _frame: FrameType | None) -> NoReturn:
    """Raise `Terminated`: the handler that a command gives to SIGTERM, so that it ends as by Ctrl-C."""
    raise Terminated


def _nothing() -> None:
    """Do nothing."""


class _MainThread:
    """The state of the main thread's regions. Python handles signals in that thread only, and no other changes this."""

    depth = 0
    noted: type[KeyboardInterrupt] | None = None
    actions: list[Callable[[], None]] = []  # noqa: RUF012 (one object, one thread)


def _note(number: int, _frame: FrameType | None) -> None:
    """Note a signal: the handler within a region."""
    if _MainThread.noted is not Terminated:
        _MainThread.noted = KeyboardInterrupt if number == signal.SIGINT else Terminated
    for action in _MainThread.actions[::-1]:
        action()


_RAISING = ((int(signal.SIGTERM), raise_terminated), (int(signal.SIGINT), signal.default_int_handler))
"""The handlers that a region replaces; any other handler is the program's own, and stays."""


class _Deferred:
    """One region; regions within it belong to it."""

    __slots__ = ("_entered", "_on_interrupt", "_replaced")

    def __init__(self, on_interrupt: Callable[[], None]) -> None:
        self._on_interrupt = on_interrupt
        self._entered = False
        self._replaced: list[tuple[int, object]] = []

    def __enter__(self) -> None:
        if threading.get_ident() != threading.main_thread().ident:
            return
        if not _MainThread.depth:
            _MainThread.noted = None
        _MainThread.depth += 1
        self._entered = True
        try:
            if _MainThread.depth == 1:
                self._replace()
            _MainThread.actions.append(self._on_interrupt)
            if _MainThread.noted is not None:
                self._on_interrupt()
        except BaseException:  # raised by a signal that came before its handler was replaced
            self._leave(None)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._entered:
            self._leave(error)

    def _leave(self, error: BaseException | None) -> None:
        """End the region; the outermost region raises the noted interrupt, unless `error` is that interrupt already."""
        if _MainThread.depth == len(_MainThread.actions):
            _MainThread.actions.pop()
        noted: type[KeyboardInterrupt] | None = None
        try:
            self._restore()
        finally:
            self._entered = False
            _MainThread.depth -= 1
            if not _MainThread.depth:
                noted, _MainThread.noted = _MainThread.noted, None
        if noted is not None and not isinstance(error, noted):
            raise noted

    def _replace(self) -> None:
        """Replace the handlers; afterwards a signal raises nothing in the region."""
        for number, handler in _RAISING:
            if _signal.getsignal(number) is handler:
                self._replaced.append((number, handler))
                try:
                    _signal.signal(number, _note)
                except ValueError:  # the main thread of `threading` is not the interpreter's
                    self._replaced.pop()
                    return

    def _restore(self) -> None:
        """Put all handlers back, even where the first of them raises at once."""
        while self._replaced:
            number, handler = self._replaced.pop(0)
            try:
                if _signal.getsignal(number) is _note:
                    _signal.signal(number, handler)
            except BaseException:
                self._restore()
                raise


def interrupts_deferred(on_interrupt: Callable[[], None] = _nothing) -> AbstractContextManager[None]:
    """Return a region: SIGINT and SIGTERM that come in it are noted, and raised at its end.

    `on_interrupt` is called at once, between two instructions of the region, so it must be quick and must not raise.
    Where an interrupt was noted already, it is called at the beginning. A region within another region belongs to the
    outer one, and raises nothing by itself.

    In threads other than the main thread the region does nothing, as Python handles no signals there. It also leaves
    signals alone whose handler is neither Python's own for SIGINT nor `raise_terminated`: that handling is the
    program's own.
    """
    return _Deferred(on_interrupt)


def interrupt_pending() -> bool:
    """Whether an interrupt waits for the end of the region that this thread is in."""
    return _MainThread.noted is not None and threading.get_ident() == threading.main_thread().ident


def raise_pending() -> None:
    """Raise the interrupt that waits for the end of this thread's region, if any, so that a wait ends early.

    Where the exception is caught in between, the end of the region raises it again, so that no interrupt is lost.
    """
    if interrupt_pending():
        assert _MainThread.noted is not None
        raise _MainThread.noted


def deferring(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Run a function in a region: a decorator."""

    @wraps(function)
    def run(*arguments: _P.args, **named: _P.kwargs) -> _R:
        with interrupts_deferred():
            return function(*arguments, **named)

    return run


def wait_interruptibly(changed: threading.Condition) -> None:
    """Wait for a notification, in a region or outside of the main thread; the caller then looks at the state again.

    In a region the wait lasts 50 ms at most, and raises an interrupt that has come.
    """
    changed.wait(POLL_INTERVAL_S if threading.get_ident() == threading.main_thread().ident else None)
    raise_pending()


class Opened(Protocol):
    """What `opening` needs of an object."""

    def _free(self) -> None:
        """Free the resources that were taken so far, which may be none."""


def opening(init: Callable[Concatenate[_O, _P], None]) -> Callable[Concatenate[_O, _P], None]:
    """Run an `__init__` in a region, and call `_free` where it does not end well: a decorator.

    That covers an error, and an interrupt that is raised at the very end, as no caller gets the object then.
    """

    @wraps(init)
    def run(self: _O, /, *arguments: _P.args, **named: _P.kwargs) -> None:
        try:
            with interrupts_deferred():
                init(self, *arguments, **named)
        except BaseException:
            with interrupts_deferred():
                self._free()
            raise

    return run


def handing_over(give_back: Callable[..., None]) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Run a function in a region, and undo it where an interrupt keeps its result from the caller: a decorator.

    `give_back(result, *arguments)` is called where an interrupt is raised at the region's end.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @wraps(function)
        def run(*arguments: _P.args, **named: _P.kwargs) -> _R:
            made: list[_R] = []
            try:
                with interrupts_deferred():
                    made.append(function(*arguments, **named))
                    return made[0]
            except BaseException:
                if made:
                    with interrupts_deferred():
                        give_back(made[0], *arguments)
                raise

        return run

    return decorate


def completing(function: Callable[_P, None]) -> Callable[_P, None]:
    """Run a function in a region, even where an interrupt comes before the region has begun: a decorator."""

    @not_interrupted_at_entry
    @wraps(function)
    def run(*arguments: _P.args, **named: _P.kwargs) -> None:
        begun = False
        try:
            with interrupts_deferred():
                begun = True
                function(*arguments, **named)
        except BaseException:
            if not begun:
                with interrupts_deferred():
                    function(*arguments, **named)
            raise

    return run


def not_interrupted_at_entry(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Keep a Python function from looking for signals before its first statement: a decorator.

    CPython looks for signals at a function's very beginning, where no `try` of the function reaches, so that work which
    must happen in any case, such as a release, would not have begun. The beginning is an instruction RESUME, whose
    argument says what is resumed; after a `yield from` it does not look. Later instructions, calls and jumps back, look
    as before. Functions of interpreters that were not checked for this are not changed.
    """
    code = function.__code__
    if sys.implementation.name == "cpython" and sys.version_info < (3, 15):
        instructions = bytearray(code.co_code)
        for at in range(0, len(instructions), 2):
            if instructions[at] == opmap["RESUME"]:
                instructions[at + 1] |= _AFTER_YIELD_FROM
                function.__code__ = code.replace(co_code=bytes(instructions))
                break
    return function
