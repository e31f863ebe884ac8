"""A byte source that counts the reads of another byte source."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from expertier.tiers.file.byte_source import ByteSource
from expertier.tiers.model.span import Span
from expertier.tiers.shared.stats import FileStats


class CountedSource:
    """A `ByteSource` that passes reads to `inner` and counts bytes, reads and failures. Thread-safe."""

    def __init__(self, inner: ByteSource) -> None:
        """Wrap `inner`; all counts start at zero."""
        self._inner = inner
        self._will_need = getattr(inner, "will_need", None)
        self._lock = threading.Lock()
        self._bytes_read = self._reads = self._failures = 0

    def read_into(self, span: Span, buffer: memoryview) -> None:
        """Read as `inner` does; a failed read counts as a failure and none of its bytes count."""
        try:
            self._inner.read_into(span, buffer)
        except BaseException:
            with self._lock:
                self._failures += 1
            raise
        with self._lock:
            self._bytes_read += span.n_bytes
            self._reads += 1

    def will_need(self, spans: Sequence[Span]) -> None:
        """Pass the hint on, where `inner` takes hints."""
        if self._will_need is not None:
            self._will_need(spans)

    def stats(self) -> FileStats:
        """Return the counts so far."""
        with self._lock:
            return FileStats(bytes_read=self._bytes_read, reads=self._reads, failures=self._failures)
