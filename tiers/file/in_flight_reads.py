"""Counts the reads that run now, so that the files are closed after the last of them has ended."""

from __future__ import annotations

import threading
from collections.abc import Callable

from expertier.tiers.file.reader import FileReader


class InFlightReads:
    """Lets reads begin until `close`, and calls `clean_up` when none runs any more. Thread-safe.

    The files must stay open during a read: the number of a closed descriptor may belong to another file by the read's
    next system call. `close` does not wait for reads either, because a disk that hangs, or a signal handler that closes
    the source in the reading thread, would make it wait for ever. So the last read to end cleans up.
    """

    def __init__(self, clean_up: Callable[[], None]) -> None:
        """Let reads begin; `clean_up` will be called once."""
        self._lock = threading.Lock()
        self._clean_up = clean_up
        self._n_running = 0
        self._closed = False

    def begin(self) -> bool:
        """Let a read begin and return True; return False after `close`."""
        with self._lock:
            if self._closed:
                return False
            self._n_running += 1
            return True

    def end(self, reader: FileReader | None, n_bytes: int) -> None:
        """Note the end of a read, and count it in the `reader` that completed it; None: the read failed."""
        with self._lock:
            self._n_running -= 1
            last = self._closed and self._n_running == 0
            if reader is not None:
                reader.n_reads += 1
                reader.bytes_read += n_bytes
        if last:
            self._clean_up()

    def close(self) -> None:
        """Let no more reads begin; clean up at once where none runs. A second call does nothing."""
        with self._lock:
            first, self._closed = not self._closed, True
            alone = self._n_running == 0
        if first and alone:
            self._clean_up()
