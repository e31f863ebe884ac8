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
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib import import_module
from types import FrameType, TracebackType
from typing import Any, NoReturn

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
            self._leave()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._entered:
            self._leave()

    def _leave(self) -> None:
        """End the region; raise what was noted where it is the outermost."""
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
        if noted is not None:
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
    """Raise the interrupt that waits for the end of this thread's region, if any; for waits, which then end early."""
    if interrupt_pending():
        noted, _MainThread.noted = _MainThread.noted, None
        assert noted is not None
        raise noted
