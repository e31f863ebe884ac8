"""Which host memory is pinned."""

from __future__ import annotations

import bisect
import threading


class PinnedRanges:
    """Disjoint ranges of pinned host memory, of all devices of one driver. Thread-safe.

    Copies from other memory would be synchronous, slow, or hang (ROCm with mapped file pages): a device refuses
    them, and this is how it knows.
    """

    def __init__(self) -> None:
        """Start without ranges."""
        self._lock = threading.Lock()
        self._begins: list[int] = []
        self._ends: list[int] = []

    def add(self, address: int, n_bytes: int) -> None:
        """Note a range; it must not overlap another."""
        with self._lock:
            i = bisect.bisect_left(self._begins, address)
            assert i == 0 or self._ends[i - 1] <= address, f"{address:#x} is within a pinned range"
            assert i == len(self._begins) or address + n_bytes <= self._begins[i], f"{address:#x} overlaps"
            self._begins.insert(i, address)
            self._ends.insert(i, address + n_bytes)

    def remove(self, address: int) -> None:
        """Forget the range that begins at `address`."""
        with self._lock:
            i = bisect.bisect_left(self._begins, address)
            assert self._begins[i : i + 1] == [address], f"{address:#x} is not pinned"
            del self._begins[i], self._ends[i]

    def hold(self, address: int, n_bytes: int) -> bool:
        """Whether all of the bytes lie in one range."""
        with self._lock:
            i = bisect.bisect_right(self._begins, address) - 1
            return i >= 0 and address + n_bytes <= self._ends[i]
