"""A byte source that counts."""

from __future__ import annotations

import threading

from expertier.tiers.byte_source import ByteSource
from expertier.tiers.stats import FileStats


class CountedSource:
    """A `ByteSource` around `inner` that counts what it read and how often it failed. Thread-safe."""

    def __init__(self, inner: ByteSource) -> None:
        """Start at zero."""
        self._inner = inner
        self._lock = threading.Lock()
        self._stats = FileStats(bytes_read=0, reads=0, failures=0)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Read as `inner` does; a failed read counts as a failure and none of its bytes count."""
        try:
            self._inner.read_into(offset, buffer)
        except BaseException:
            self._add(n_bytes=0, reads=0, failures=1)
            raise
        self._add(n_bytes=len(buffer), reads=1, failures=0)

    def stats(self) -> FileStats:
        """Return the counts so far."""
        return self._stats

    def _add(self, *, n_bytes: int, reads: int, failures: int) -> None:
        with self._lock:
            now = self._stats
            self._stats = FileStats(
                bytes_read=now.bytes_read + n_bytes,
                reads=now.reads + reads,
                failures=now.failures + failures,
            )
