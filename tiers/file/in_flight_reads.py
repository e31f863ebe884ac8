"""The reads that run now, so that the files are closed after the last of them."""

from __future__ import annotations

import threading
from collections.abc import Callable

from expertier.tiers.file.reader import FileReader


class InFlightReads:
    """Lets reads begin until it is closed, counts them, and cleans up when the last of them has ended.

    A descriptor that is closed during a read may be another file's before the read's next system call.
    Closing does not wait for reads either: a disk that hangs, or a signal handler in the reading thread, would
    have it wait for ever. Thread-safe.
    """

    def __init__(self, clean_up: Callable[[], None]) -> None:
        """Open; `clean_up` is called once."""
        self._lock = threading.Lock()
        self._clean_up = clean_up
        self._n_running = 0
        self._closed = False

    def begin(self) -> bool:
        """Let a read begin; False when closed."""
        with self._lock:
            if self._closed:
                return False
            self._n_running += 1
            return True

    def end(self, reader: FileReader | None, n_bytes: int) -> None:
        """Note that a read has ended, and count it with the reader that completed it; None where the read failed."""
        with self._lock:
            self._n_running -= 1
            last = self._closed and self._n_running == 0
            if reader is not None:
                reader.n_reads += 1
                reader.bytes_read += n_bytes
        if last:
            self._clean_up()

    def close(self) -> None:
        """Let no read begin any more; a second call does nothing."""
        with self._lock:
            first, self._closed = not self._closed, True
            alone = self._n_running == 0
        if first and alone:
            self._clean_up()
