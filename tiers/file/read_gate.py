"""Who reads now, so that nobody closes under them."""

from __future__ import annotations

import threading
from collections.abc import Callable

from expertier.tiers.file.reader import FileReader


class ReadGate:
    """Lets reads in until it is closed, counts them, and cleans up when the last one has left.

    A descriptor that is closed during a read may be another file's before the read's next system call.
    Closing does not wait for reads either: a disk that hangs, or a signal handler in the reading thread, would
    have it wait for ever. Thread-safe.
    """

    def __init__(self, clean_up: Callable[[], None]) -> None:
        """Open; `clean_up` is called once."""
        self._lock = threading.Lock()
        self._clean_up = clean_up
        self._inside = 0
        self._closed = False

    def enter(self) -> bool:
        """Let a read in; False when closed."""
        with self._lock:
            if self._closed:
                return False
            self._inside += 1
            return True

    def leave(self, reader: FileReader | None, n_bytes: int) -> None:
        """Let a read out, and count it with the reader that completed it; None where the read failed."""
        with self._lock:
            self._inside -= 1
            last = self._closed and self._inside == 0
            if reader is not None:
                reader.n_reads += 1
                reader.bytes_read += n_bytes
        if last:
            self._clean_up()

    def close(self) -> None:
        """Let nobody in any more; a second call does nothing."""
        with self._lock:
            first, self._closed = not self._closed, True
            alone = self._inside == 0
        if first and alone:
            self._clean_up()
