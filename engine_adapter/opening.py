"""What is opened is closed, also where an interrupt takes it away before its owner has it.

An interrupt is raised between two instructions: after a call of the engine's has returned, and before its result is
kept; or after a model was returned, and before the `with` that would close it has begun. So opening runs with
interrupts deferred, and undoes itself where one came meanwhile. What is dropped unclosed all the same is kept for
`close_abandoned`: it is not closed where it is dropped, as that may be any place, the middle of a lock included.

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
    """What can be closed, twice included."""

    def close(self) -> None:
        """Give back what it holds; `BusyError` where it cannot yet, and is to be closed again."""


_log = logging.getLogger(__name__)

P = ParamSpec("P")
ClosableT = TypeVar("ClosableT", bound=Closable)

_abandoned: deque[Closable] = deque()

closed_when_dropped: Any = property(partial(partial, _abandoned.append))
"""For `__del__` of a class: `close_abandoned` closes its objects that were dropped, or does nothing to closed ones.

Written in Python, a `__del__` would be a place where an interrupt is raised, and then printed and forgotten.
"""


def closed_if_interrupted(open_: Callable[P, ClosableT]) -> Callable[P, ClosableT]:
    """Have a function that opens something defer interrupts, and close what it has opened where one came.

    What takes long inside should end early by `raise_pending`.
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
    """Close what was dropped unclosed; what is busy still stays for the next time."""
    with interrupts_deferred():
        busy = []
        while _abandoned:
            with suppress(IndexError):  # another thread does the same
                dropped = _abandoned.popleft()
                try:
                    dropped.close()
                except ExpertierError:
                    busy.append(dropped)
                except Exception:  # not the business of whoever opens or closes something else
                    _log.exception("%r was dropped, and cannot be closed", dropped)
                del dropped  # a context that is gone lets its model go, which is then the next
        _abandoned.extend(busy)


@not_interrupted_at_entry
def close_after(opened: Closable, error: BaseException | None) -> None:
    """Close at the end of a `with` block, also where an interrupt meets the first try.

    Where that is refused and an error is on its way already, the error goes on, with a note of it; the object is closed
    once what keeps it busy is.
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
