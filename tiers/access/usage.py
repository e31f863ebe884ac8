"""Counts who uses the tiers now, and so decides when the slots may be changed."""

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
"""The `Usage` of all tiers that are not closed. A `WeakSet` would lose an interrupt that comes in its callback."""


def _note_fork() -> None:
    for reference in list(_open):
        usage = reference()
        if usage is not None:
            usage.note_fork()


os.register_at_fork(after_in_child=_note_fork)


class _Exclusively(AbstractContextManager[None]):
    """The `with` block of `Usage.exclusively`. It is no generator, because a move of the boundary waits for it."""

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

    `exclusively` is for changes of where the slots lie. It waits until there are no leases and no background fills.
    While it waits, a new lease is given only to a thread that holds a lease already, because that thread's leases are
    waited for, too.

    The lock of this class is held for book-keeping only, and no layer's lock is taken while it is held. The main thread
    must be in a region of `interrupts.py` when it calls a method that changes something, except `add` and `forget`; it
    is interrupted only while it waits.

    In a child of `os.fork` the tiers are CLOSED: the child has none of the parent's threads, and a lock that one of
    them held is never released.
    """

    def __init__(self) -> None:
        """Start open, without leases, fills or an engine."""
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
        """Raise `LeaseError` in a process that was forked from the one that made the tiers."""
        if self._forked:
            raise LeaseError(
                "these tiers belong to the process that this one was forked from: open them in the child, or start it "
                "with subprocess or multiprocessing's `spawn`"
            )

    def note_fork(self) -> None:
        """Note that this process was forked from the one that made the tiers."""
        self._lock = threading.Lock()  # a new one, as another thread may have held the old one
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
        """Note a new lease, after waiting for a running change of the slots. Raises `LeaseError` where closed."""
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
        """Whether any lease that the thread with this identifier acquired holds slots."""
        with self._lock:
            return any(lease.thread == thread and lease.held is not None for lease in self._leases)

    @contextmanager
    def engine_fill(self) -> Iterator[None]:
        """Count a fill for the engine, for the length of a `with` block. Raises `LeaseError` where closed."""
        with self._lock:
            self._require_open()
            self._engine_fills += 1
        try:
            yield
        finally:
            with self._lock:
                self._engine_fills -= 1

    def enter_background(self) -> bool:
        """Let a background fill begin, after waiting for changes of the slots; return False where closed."""
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
        """Note that an engine is bound. Raises `BusyError` where an engine is bound already."""
        with self._lock:
            while self._moving:
                wait_interruptibly(self._changed)
            self._require_open()
            if self._bound:
                raise BusyError(
                    "an engine is bound already: a manager serves one engine at a time; unbind it first"
                )
            self._bound = True

    def unbind(self, count_pins: Callable[[], int]) -> None:
        """Note that the engine uses the tiers no more; nothing to do where none is bound.

        `count_pins` returns the number of all pins. Raises `BusyError` while fills for the engine run, or while there
        are more pins than leases account for.
        """
        with self._lock:
            if not self._bound:
                return
            self._n_exclusive += 1  # keeps new background fills out, for which this would have to wait, too
            try:
                while self._background:  # background fills hold pins, too, and end by themselves
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
        """Keep leases, background fills and an engine out for the length of a `with` block, in order to `what`.

        Waits for leases of other threads for up to `wait_s` seconds, and raises `BusyError` after that. Raises it at
        once where this thread holds leases itself or an engine is bound. `for_engine` is set by the bound engine
        itself, which has made sure that it uses no slots meanwhile.
        """
        return _Exclusively(self._enter_alone, self._leave_alone, what, wait_s, for_engine)

    def close(self) -> bool:
        """Allow no further use, and return True; return False where closed already. Raises `BusyError` while in use."""
        with self._lock:
            if self._closed:
                return False
            self._require_idle("close")
            if self._moving:
                raise BusyError("cannot close while the slots are being moved: wait for that call to return")
            self._closed = True
            _open.discard(self._reference)
            while self._background:  # not ended by interrupts: no later call would close the rest
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
