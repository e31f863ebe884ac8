"""Who uses the tiers now, and so what may change."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType

from expertier.errors import BusyError, LeaseError
from expertier.interrupts import POLL_INTERVAL_S, deferring, raise_pending, wait_interruptibly
from expertier.tiers.access.lease import Lease

WAIT_S = 60.0
"""How long a change of the slots waits for other threads' leases."""


_open: set[weakref.ref[Usage]] = set()
"""Tiers that are not closed. No `WeakSet`, whose callback is a place where an interrupt would get lost."""


def _note_fork() -> None:
    for reference in list(_open):
        usage = reference()
        if usage is not None:
            usage.note_fork()


os.register_at_fork(after_in_child=_note_fork)


class _Exclusively(AbstractContextManager[None]):
    """The `with` block of `Usage.exclusively`: not a generator, as a move of the boundary waits for it."""

    __slots__ = ("_arguments", "_enter", "_leave")

    def __init__(
        self,
        enter: Callable[[str, float, bool], None],
        leave: Callable[[], None],
        what: str,
        wait_s: float,
        for_engine: bool,
    ) -> None:
        self._enter = enter
        self._leave = leave
        self._arguments = what, wait_s, for_engine

    def __enter__(self) -> None:
        self._enter(*self._arguments)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()


class Usage:
    """The live leases, the bound engine, its running fills, and background fills. Thread-safe.

        OPEN ──► bind ──► BOUND ──► unbind ──► OPEN ──► close ──► CLOSED

    `exclusively` is for changes of where the slots lie: it waits until nobody is there, and meanwhile lets in
    only threads that hold a lease already, as it waits for those. Its lock is held for book-keeping only;
    nobody takes a layer's lock meanwhile. The main thread calls all but `add`, `forget` and what only looks in a region
    of `interrupts.py`, and is interrupted in its waits only.

    In a child of `os.fork` it is CLOSED: the threads are not there, and locks may be held for ever.
    """

    def __init__(self) -> None:
        """Start open, with nobody there."""
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._leases: set[Lease] = set()
        self._engine_fills = 0
        self._background = 0
        self._n_exclusive = 0  # threads inside `exclusively` or waiting for it
        self._moving = False
        self._bound = False
        self._closed = False
        self._forked = False
        self._reference = weakref.ref(self)
        _open.add(self._reference)

    def require_not_forked(self) -> None:
        """Raise `LeaseError` in a child of the process that made it."""
        if self._forked:
            raise LeaseError(
                "these tiers belong to the process that this one was forked from: open them in the child, or start it "
                "with subprocess or multiprocessing's `spawn`"
            )

    def note_fork(self) -> None:
        """Note that this is a child of the process that made it."""
        self._lock = threading.Lock()  # another thread may have held the one that was
        self._changed = threading.Condition(self._lock)
        self._closed = self._forked = True

    @property
    def bound(self) -> bool:
        """Whether an engine is bound."""
        return self._bound

    def leases(self) -> list[Lease]:
        """Return the live leases."""
        with self._lock:
            return list(self._leases)

    def add(self, lease: Lease) -> None:
        """Note a new lease; waits for a change of the slots. `LeaseError` when the tiers are closed."""
        with self._lock:
            if not self._n_exclusive and not self._closed:
                self._leases.add(lease)
                return
        self._add_waiting(lease)

    @deferring
    def _add_waiting(self, lease: Lease) -> None:
        with self._lock:
            while self._n_exclusive and not self._has_lease(lease.thread) and not self._closed:
                wait_interruptibly(self._changed)
            self._require_open()
            self._leases.add(lease)

    def forget(self, lease: Lease) -> None:
        """Note that a lease has ended."""
        with self._lock:
            self._leases.discard(lease)
            if self._n_exclusive:
                self._changed.notify_all()

    def holds_slots(self, thread: int) -> bool:
        """Whether one of the leases that a thread acquired holds slots."""
        with self._lock:
            return any(lease.thread == thread and lease.held is not None for lease in self._leases)

    @contextmanager
    def engine_fill(self) -> Iterator[None]:
        """Count a fill that an engine asked for while it runs."""
        with self._lock:
            self._require_open()
            self._engine_fills += 1
        try:
            yield
        finally:
            with self._lock:
                self._engine_fills -= 1

    def enter_background(self) -> bool:
        """Let a background fill in, after whoever needs the slots alone; False when the tiers are closed."""
        with self._lock:
            while self._n_exclusive and not self._closed:
                wait_interruptibly(self._changed)
            if self._closed:
                return False
            self._background += 1
            return True

    def leave_background(self) -> None:
        """Note that a background fill has ended."""
        with self._lock:
            self._background -= 1
            self._changed.notify_all()

    def bind(self) -> None:
        """Note that an engine is bound; `BusyError` when one is already."""
        with self._lock:
            while self._moving:
                wait_interruptibly(self._changed)
            self._require_open()
            if self._bound:
                raise BusyError("an engine is bound already: one manager serves the engine of one model")
            self._bound = True

    def unbind(self, count_pins: Callable[[], int]) -> None:
        """Note that the engine is gone; `BusyError` while it runs fills or holds more pins than the
        leases."""
        with self._lock:
            if not self._bound:
                return
            self._n_exclusive += (
                1  # else those that wait to begin could keep this waiting till the last of them
            )
            try:
                while self._background:  # they hold pins, too, and ask for nothing that could be held here
                    wait_interruptibly(self._changed)
            finally:
                self._n_exclusive -= 1
                self._changed.notify_all()
            leased = sum(len(lease.held.slots) for lease in self._leases if lease.held is not None)
            pinned = max(count_pins() - leased, 0)
            if self._engine_fills or pinned:
                raise BusyError(
                    f"the engine still holds {pinned} slots and runs {self._engine_fills} fills: free its "
                    "contexts first"
                )
            self._bound = False

    def exclusively(
        self, what: str, *, wait_s: float = WAIT_S, for_engine: bool = False
    ) -> AbstractContextManager[None]:
        """Keep everyone out for the length of a `with` block.

        Waits for the leases of other threads, `wait_s` seconds at most; raises `BusyError` after that, and at
        once while this thread holds leases itself or an engine is bound. Nothing has changed then. `for_engine` is
        for the bound engine itself, which has seen to it that it uses no slots meanwhile.
        """
        return _Exclusively(self._enter_alone, self._leave_alone, what, wait_s, for_engine)

    def close(self) -> bool:
        """Let nobody in any more; False when that was so already. `BusyError` when someone is there."""
        with self._lock:
            if self._closed:
                return False
            self._require_idle("close")
            if self._moving:
                raise BusyError("cannot close while the slots are being moved: wait for that call to return")
            self._closed = True
            _open.discard(self._reference)
            while self._background:  # however many interrupts come: nobody would close the rest
                self._changed.wait()
            self._changed.notify_all()
            return True

    def _enter_alone(self, what: str, wait_s: float, for_engine: bool) -> None:
        with self._lock:
            self._require_open()
            if self._leases and self._has_lease(threading.get_ident()):
                self._require_idle(what, for_engine=for_engine)
            self._n_exclusive += 1
            try:
                if self._moving or self._leases or self._background:
                    self._wait_for_others(what, wait_s, for_engine)
                self._require_idle(what, for_engine=for_engine)
                self._moving = True
            except BaseException:
                self._n_exclusive -= 1
                self._changed.notify_all()
                raise

    def _leave_alone(self) -> None:
        with self._lock:
            self._moving = False
            self._n_exclusive -= 1
            self._changed.notify_all()

    # ---- with the lock held

    def _wait_for_others(self, what: str, wait_s: float, for_engine: bool) -> None:
        deadline = time.monotonic() + wait_s
        while self._moving or self._leases or self._background:
            self._require_unbound(what, for_engine=for_engine)
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                self._require_idle(what, for_engine=for_engine)
            self._changed.wait(POLL_INTERVAL_S if left_s <= 0 else min(left_s, POLL_INTERVAL_S))
            raise_pending()

    def _has_lease(self, thread: int) -> bool:
        return any(lease.thread == thread for lease in self._leases)

    def _require_open(self) -> None:
        self.require_not_forked()
        if self._closed:
            raise LeaseError("these tiers were closed: make another TierManager")

    def _require_unbound(self, what: str, *, for_engine: bool = False) -> None:
        if self._engine_fills or (self._bound and not for_engine):
            raise BusyError(
                f"cannot {what} while an engine is bound: free its model, then call engine.unbind()"
            )

    def _require_idle(self, what: str, *, for_engine: bool = False) -> None:
        self._require_open()
        self._require_unbound(what, for_engine=for_engine)
        if self._leases:
            layers = sorted({lease.layer for lease in self._leases})
            raise BusyError(
                f"cannot {what} while {len(self._leases)} leases are live, on layers {layers}: release them"
            )
