"""Knows which host memory is pinned."""

from __future__ import annotations

import bisect
import threading
from collections.abc import Iterable, Sequence


class PinnedRanges:
    """The ranges of pinned host memory of all devices of one driver; they do not overlap. Thread-safe.

    A device refuses copies from or to other host memory, because drivers do them synchronously and slowly, or hang
    (ROCm with mapped file pages).
    """

    def __init__(self) -> None:
        """Start without ranges."""
        self._lock = threading.Lock()
        self._begins: list[int] = []
        self._ends: list[int] = []

    def add(self, address: int, n_bytes: int) -> None:
        """Add a range, which must not overlap another range."""
        with self._lock:
            i = bisect.bisect_left(self._begins, address)
            assert i == 0 or self._ends[i - 1] <= address, f"{address:#x} is within a pinned range"
            assert i == len(self._begins) or address + n_bytes <= self._begins[i], f"{address:#x} overlaps"
            self._begins.insert(i, address)
            self._ends.insert(i, address + n_bytes)

    def remove(self, address: int) -> None:
        """Remove the range that begins at `address`."""
        with self._lock:
            i = bisect.bisect_left(self._begins, address)
            assert self._begins[i : i + 1] == [address], f"{address:#x} is not pinned"
            del self._begins[i], self._ends[i]

    def contain(self, address: int, n_bytes: int) -> bool:
        """Whether all of the bytes lie within one range."""
        return self.stranger([(address, n_bytes)]) is None

    def stranger(self, pieces: Iterable[Sequence[int]]) -> tuple[int, int] | None:
        """Return the first of `pieces`, (address, bytes), that is not wholly pinned; None where all pieces are."""
        with self._lock:
            begins, ends = self._begins, self._ends
            for address, n_bytes in pieces:
                i = bisect.bisect_right(begins, address) - 1
                if i < 0 or address + n_bytes > ends[i]:
                    return address, n_bytes
        return None
