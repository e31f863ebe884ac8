"""Finds out when the page cache has filled with as much of the model as it can hold."""

from __future__ import annotations

_LEAST_READS = 32  # timed reads in a stretch
_GAIN = 1.1  # the cache still fills where a stretch is faster than the stretch before by this factor


class CacheFilling:
    """Compares the speed of successive stretches of reads through a cache that was empty at first.

    While the cache fills, reads get faster; it has filled once they no longer do. Counting the bytes that were read
    would not do, because some bytes are read twice before others are read once: random reads have touched only 63 % of
    a working set when they have read as many bytes as the set has.
    """

    def __init__(self, fill_bytes: int) -> None:
        """Make a stretch half of `fill_bytes` long: the bytes of the working set that the cache can hold."""
        self._stretch_bytes = fill_bytes / 2
        self._before: float | None = None
        self.done = False
        """Whether the cache has filled."""
        self._start()

    def add(self, n_bytes: int, stands_for: int, seconds: float) -> None:
        """Count a timed read of `n_bytes`; it and the untimed reads around it have read `stands_for` bytes."""
        self._n_reads += 1
        self._n_bytes += n_bytes
        self._all_bytes += stands_for
        self._seconds += seconds
        if self._n_reads < _LEAST_READS or self._all_bytes < self._stretch_bytes:
            return
        rate = self._n_bytes / self._seconds if self._seconds > 0 else 0.0
        if self._before is not None and rate < _GAIN * self._before:
            self.done = True
        self._before = rate
        self._start()

    def _start(self) -> None:
        self._n_reads = 0
        self._n_bytes = 0
        self._all_bytes = 0
        self._seconds = 0.0
