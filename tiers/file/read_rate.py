"""How fast the latest reads were."""

from __future__ import annotations

_OLD_SHARE = 31 / 32  # each read reduces the weight of all reads before it by this factor


class ReadRate:
    """Bytes a second over about the last thirty reads: their bytes divided by their time, so long reads count more."""

    def __init__(self) -> None:
        """Begin without reads."""
        self.n_reads = 0
        self._bytes = 0.0
        self._seconds = 0.0

    def add(self, n_bytes: int, seconds: float) -> None:
        """Count a read of `n_bytes` that took `seconds`."""
        self.n_reads += 1
        self._bytes = self._bytes * _OLD_SHARE + n_bytes
        self._seconds = self._seconds * _OLD_SHARE + seconds

    @property
    def bytes_per_s(self) -> float:
        """The rate; 0 where it is not known, before the first read or where the clock did not advance."""
        return self._bytes / self._seconds if self._seconds > 0 else 0.0
