"""Notices when the machine runs short of memory, and how far the host pools have to shrink then."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from expertier.tiers.shared import host_memory
from expertier.units import GIB

INTERVAL_S = 1.0
"""The shortest time between two looks at the machine's memory, each of which reads a few files."""

LARGEST_FLOOR_BYTES = GIB

FLOOR_DIVISOR = 16
"""By default the floor is the memory available at the start divided by this, at most `LARGEST_FLOOR_BYTES`."""


class MemoryPressure:
    """Watches the available memory and sets a ceiling for all host pools together. Thread-safe.

    available      below the floor        between              above twice the floor
                ─────────────────────┼─────────────────────┼──────────────────────────
    ceiling     lowered, so that 1.5      unchanged           raised by the excess;
                times the floor is                            removed when it reaches
                available again                               the pools' limit

    The gap between the two marks keeps the pools from shrinking and growing in turns.
    """

    def __init__(
        self,
        floor_bytes: int | None = None,
        *,
        available_bytes: Callable[[], int] = host_memory.available_bytes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Watch with a floor of `floor_bytes`; `available_bytes` and `clock` are for tests."""
        if floor_bytes is None:
            floor_bytes = min(LARGEST_FLOOR_BYTES, available_bytes() // FLOOR_DIVISOR)
        self.floor_bytes = floor_bytes
        self.ceiling_bytes: int | None = None
        """The bytes that all pools together may take now; None while the machine is not short of memory."""
        self._available_bytes = available_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._next_s = clock()

    def is_due(self) -> bool:
        """Whether enough time has passed since the last look at the machine's memory."""
        return self._clock() >= self._next_s

    def poll(self, used_bytes: int, limit_bytes: int) -> bool:
        """Look at the machine's memory, unless that was done just now; return whether the ceiling changed.

        `used_bytes` is what all pools take now, and `limit_bytes` what they may take where memory is not short.
        """
        if not self.is_due() or not self._lock.acquire(blocking=False):
            return False
        try:
            self._next_s = self._clock() + INTERVAL_S
            before = self.ceiling_bytes
            self.ceiling_bytes = self._ceiling(used_bytes, limit_bytes)
            return self.ceiling_bytes != before
        finally:
            self._lock.release()

    def _ceiling(self, used_bytes: int, limit_bytes: int) -> int | None:
        available = self._available_bytes()
        if available < self.floor_bytes:
            return max(0, used_bytes - (self.floor_bytes * 3 // 2 - available))
        if self.ceiling_bytes is not None and available > 2 * self.floor_bytes:
            ceiling = max(self.ceiling_bytes, used_bytes + available - 2 * self.floor_bytes)
            return ceiling if ceiling < limit_bytes else None
        return self.ceiling_bytes
