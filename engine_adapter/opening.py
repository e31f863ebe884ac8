"""Closes opened objects even where an interrupt comes before their owner has them.

An interrupt may be raised between any two instructions: after a call of the engine has returned and before its result
is assigned, or after a model was returned and before the `with` that would close it has begun. So opening runs with
interrupts deferred, and closes what it opened where an interrupt came meanwhile. An object that is dropped unclosed
nevertheless waits for `close_abandoned`: it cannot be closed where it is dropped, because that may be inside a lock.

    opened ──► returned ──► with ──► close
       │ interrupt  │ interrupt, dropped
       ▼            ▼
     close       abandoned ──► the next opening or closing: close
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial, wraps
from typing import Any, ParamSpec, Protocol, TypeVar

from expertier.errors import BusyError, ExpertierError
from expertier.interrupts import interrupts_deferred, not_interrupted_at_entry


class Closable(Protocol):
    """An object that can be closed; a second call does nothing."""

    def close(self) -> None:
        """Release what the object holds. `BusyError`: the object is in use, and has to be closed again later."""


_log = logging.getLogger(__name__)

P = ParamSpec("P")
ClosableT = TypeVar("ClosableT", bound=Closable)

_abandoned: deque[Closable] = deque()

closed_when_dropped: Any = property(partial(partial, _abandoned.append))
"""For `__del__` of a class: `close_abandoned` closes its objects that were dropped; a closed object stays closed.

Written in Python, a `__del__` could be interrupted, and Python would print that interrupt and forget it.
"""


def closed_if_interrupted(open_: Callable[P, ClosableT]) -> Callable[P, ClosableT]:
    """Have a function that opens an object defer interrupts, and close the object where an interrupt came.

    A function that takes long should call `raise_pending` to end early.
    """

    @wraps(open_)
    def open_deferring(*arguments: P.args, **named: P.kwargs) -> ClosableT:
        opened: ClosableT | None = None
        try:
            with interrupts_deferred():
                close_abandoned()
                opened = open_(*arguments, **named)
            return opened  # noqa: RET504 (the end of the region raises, and then it has to be closed)
        except BaseException:
            if opened is not None:
                opened.close()
            raise

    return open_deferring


def close_abandoned() -> None:
    """Close the objects that were dropped unclosed; an object that is still busy stays for the next call."""
    with interrupts_deferred():
        busy = []
        while _abandoned:
            with suppress(IndexError):  # another thread may be closing the same objects
                dropped = _abandoned.popleft()
                try:
                    dropped.close()
                except ExpertierError:
                    busy.append(dropped)
                except Exception:  # the caller opens or closes another object, and must not fail for this one
                    _log.exception("%r was dropped, and cannot be closed", dropped)
                del dropped  # a context that is deleted releases its model, which then comes next
        _abandoned.extend(busy)


@not_interrupted_at_entry
def close_after(opened: Closable, error: BaseException | None) -> None:
    """Close at the end of a `with` block, even where an interrupt ends the first attempt.

    Where closing is refused and an error is being raised already, that error goes on with a note about the refusal; the
    object is closed later, once it is no longer busy.
    """
    try:
        try:
            opened.close()
        except KeyboardInterrupt:
            opened.close()
            raise
    except BusyError as busy:
        if error is None:
            raise
        error.add_note(f"not closed yet: {busy}")
