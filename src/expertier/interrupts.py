"""Interrupts, SIGINT and SIGTERM: kept out of what must not end half-way, and raised when it has ended.

CPython runs signal handlers in the main thread, between two instructions of whatever Python code runs there, and
the usual handlers raise. What holds something from one instruction to another runs in a region:

    with interrupts_deferred():       a signal is noted from here on
        ...
        raise_pending()               a wait ends early, where nothing is half done
        ...
                                      the end: KeyboardInterrupt, or Terminated, if one was noted

Code that hands something over to its caller needs more than that, as the end of the region may raise: it undoes
what it did in an `except` around the region.
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
"""What RESUME's argument is then; 0 is a function's beginning."""

_signal: Any = import_module(
    "_signal"
)  # what `signal` wraps in Python, which looks enums up and takes ten times as long


class Terminated(KeyboardInterrupt):
    """SIGTERM has asked the process to end: handled as Ctrl-C is, by everyone who does not tell them apart."""


def raise_terminated(_number: int, _frame: FrameType | None) -> NoReturn:
    """Raise `Terminated`: the handler that a command gives to SIGTERM, so that it ends as by Ctrl-C."""
    raise Terminated


def _nothing() -> None:
    """Do nothing."""


class _MainThread:
    """What is noted of the main thread, where alone Python handles signals; no other thread changes it."""

    depth = 0
    noted: type[KeyboardInterrupt] | None = None
    actions: list[Callable[[], None]] = []  # noqa: RUF012 (one object, one thread)


def _note(number: int, _frame: FrameType | None) -> None:
    """Take the place of the handlers within a region."""
    if _MainThread.noted is not Terminated:
        _MainThread.noted = KeyboardInterrupt if number == signal.SIGINT else Terminated
    for action in _MainThread.actions[::-1]:
        action()


_RAISING = ((int(signal.SIGTERM), raise_terminated), (int(signal.SIGINT), signal.default_int_handler))
"""The handlers that a region replaces; others are the program's own, and stay."""


class _Deferred:
    """One region; the inner ones of a thread belong to the outermost."""

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
        except BaseException:  # of a signal that came before its handler was replaced
            self._leave(None)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._entered:
            self._leave(error)

    def _leave(self, error: BaseException | None) -> None:
        """End the region; where it is the outermost, raise what was noted, unless `error` is that already."""
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
        """Take the handlers' places; once this has been done nothing is raised any more."""
        for number, handler in _RAISING:
            if _signal.getsignal(number) is handler:
                self._replaced.append((number, handler))
                try:
                    _signal.signal(number, _note)
                except ValueError:  # the main thread of `threading` is not the interpreter's
                    self._replaced.pop()
                    return

    def _restore(self) -> None:
        """Put the handlers back: all of them, even where the first that is back raises at once."""
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

    `on_interrupt` is called at once, between two instructions of the region: it must be quick and not raise. It is
    called at the beginning where one was noted already. A region within another belongs to that one, and raises
    nothing by itself.

    In other threads than the main one this does nothing: Python handles no signals there. Nor does it for a signal
    whose handler is neither Python's own for SIGINT nor `raise_terminated`: what the program does at its signals is
    the program's.
    """
    return _Deferred(on_interrupt)


def interrupt_pending() -> bool:
    """Whether an interrupt waits for the end of the region that this thread is in."""
    return _MainThread.noted is not None and threading.get_ident() == threading.main_thread().ident


def raise_pending() -> None:
    """Raise the interrupt that waits for the end of this thread's region, if any; for waits, which then end early.

    The end of the region raises it again where it was caught in between: none is lost.
    """
    if interrupt_pending():
        assert _MainThread.noted is not None
        raise _MainThread.noted


def deferring(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Run all of a function in a region: a decorator."""

    @wraps(function)
    def run(*arguments: _P.args, **named: _P.kwargs) -> _R:
        with interrupts_deferred():
            return function(*arguments, **named)

    return run


def wait_interruptibly(changed: threading.Condition) -> None:
    """Wait for a notification, in a region or in another thread than the main one; then look at the state again.

    In a region it lasts 50 ms at most, and an interrupt that has come is raised.
    """
    changed.wait(POLL_INTERVAL_S if threading.get_ident() == threading.main_thread().ident else None)
    raise_pending()


class Opened(Protocol):
    """What `opening` needs of an object."""

    def _free(self) -> None:
        """Give back what was taken so far, which may be nothing."""


def opening(init: Callable[Concatenate[_O, _P], None]) -> Callable[Concatenate[_O, _P], None]:
    """Run an `__init__` in a region, and call `_free` where it does not end well: a decorator.

    So for an error, and for an interrupt that is raised when all is done, as nobody gets the object then.
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
    """Run a function in a region, and undo it where nobody gets what it returns: a decorator.

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
    """Run a function in a region, and do so even where an interrupt comes before that has begun: a decorator."""

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
    """Have a Python function not look for signals before its first statement: a decorator.

    CPython does so at a function's very beginning, where no `try` of the function's reaches, so that what has to
    happen in any case, such as a release, would not have begun. The beginning is an instruction RESUME, whose argument
    says what is resumed: where that is a `yield from` there is no look. What follows, calls and jumps back, look as
    ever. Other interpreters than those that this is known of are left as they are.
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
