"""Who uses the tiers now, and so what may change."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from expertier.errors import BusyError, LeaseError
from expertier.tiers.lease import Lease


class Usage:
    """The live leases, the bound engine and its running fills. Thread-safe.

        OPEN ──► bind ──► BOUND ──► unbind ──► OPEN ──► close ──► CLOSED

    Its lock is held for book-keeping and for `exclusively` only; nobody takes a layer's lock meanwhile.
    """

    def __init__(self) -> None:
        """Start open, with nobody there."""
        self._lock = threading.Lock()
        self._leases: set[Lease] = set()
        self._engine_fills = 0
        self._bound = False
        self._closed = False

    @property
    def bound(self) -> bool:
        """Whether an engine is bound."""
        return self._bound

    def leases(self) -> list[Lease]:
        """Return the live leases."""
        with self._lock:
            return list(self._leases)

    def add(self, lease: Lease) -> None:
        """Note a new lease; `LeaseError` when the tiers are closed."""
        with self._lock:
            self._require_open()
            self._leases.add(lease)

    def forget(self, lease: Lease) -> None:
        """Note that a lease has ended."""
        with self._lock:
            self._leases.discard(lease)

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

    def bind(self) -> None:
        """Note that an engine is bound; `BusyError` when one is already."""
        with self._lock:
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
            leased = sum(len(lease.held.slots) for lease in self._leases if lease.held is not None)
            pinned = max(count_pins() - leased, 0)
            if self._engine_fills or pinned:
                raise BusyError(
                    f"the engine still holds {pinned} slots and runs {self._engine_fills} fills: free its "
                    "contexts first"
                )
            self._bound = False

    @contextmanager
    def exclusively(self, what: str) -> Iterator[None]:
        """Keep everyone out for the length of a `with` block; `BusyError` when someone is there."""
        with self._lock:
            self._require_idle(what)
            yield

    def close(self) -> bool:
        """Let nobody in any more; False when that was so already. `BusyError` when someone is there."""
        with self._lock:
            if self._closed:
                return False
            self._require_idle("close")
            self._closed = True
            return True

    def _require_open(self) -> None:
        if self._closed:
            raise LeaseError("these tiers were closed: make another TierManager")

    def _require_idle(self, what: str) -> None:
        self._require_open()
        if self._bound or self._engine_fills:
            raise BusyError(f"cannot {what} while an engine is bound: free its model, then unbind_engine")
        if self._leases:
            layers = sorted({lease.layer for lease in self._leases})
            raise BusyError(
                f"cannot {what} while {len(self._leases)} leases are live, on layers {layers}: release them"
            )
