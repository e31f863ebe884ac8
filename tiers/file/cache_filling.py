"""When a page cache has filled."""

from __future__ import annotations

_LEAST_READS = 32  # timed, in a stretch
_GAIN = 1.1  # a stretch that is faster than the one before by this says that the cache still fills


class CacheFilling:
    """Watches reads through a cache that was empty get faster, and notes when they do no more.

    Which bytes are read next is not known here, so a count of bytes would not tell: reads at random have touched
    only 63 % of a set when they have read as many bytes as it has.
    """

    def __init__(self, fill_bytes: int) -> None:
        """Compare stretches of half of `fill_bytes`, what the cache can hold of the working set."""
        self._stretch_bytes = fill_bytes / 2
        self._before: float | None = None
        self.done = False
        """Whether it fills no further."""
        self._start()

    def add(self, n_bytes: int, stands_for: int, seconds: float) -> None:
        """Count a timed read of `n_bytes`; with those that were not timed, it stands for `stands_for` bytes."""
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
