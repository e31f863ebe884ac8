"""How fast reads are, lately."""

from __future__ import annotations

_OLD_SHARE = 31 / 32  # what counts of everything before, at each read


class ReadRate:
    """Bytes a second over the last thirty reads or so; of long reads more than of short ones, as time is."""

    def __init__(self) -> None:
        """Know nothing."""
        self.n_reads = 0
        self._bytes = 0.0
        self._seconds = 0.0

    def add(self, n_bytes: int, seconds: float) -> None:
        """Count a read."""
        self.n_reads += 1
        self._bytes = self._bytes * _OLD_SHARE + n_bytes
        self._seconds = self._seconds * _OLD_SHARE + seconds

    @property
    def bytes_per_s(self) -> float:
        """The rate; 0 before the first read, and where the clock did not move: nothing follows from that."""
        return self._bytes / self._seconds if self._seconds > 0 else 0.0
