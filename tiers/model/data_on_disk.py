"""How many of a file's bytes are on disk, and not a hole that reads as zeros."""

from __future__ import annotations

import errno
import os


class DataOnDisk:
    """The bytes of an open file that are data, counted from its beginning and only as far as somebody asks.

    A file system that knows of no holes calls all bytes data.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self._descriptor = descriptor
        self.size = size
        self.found = 0
        """Bytes that were found so far."""
        self._looked_until = 0

    def has(self, n_bytes: int) -> bool:
        """Whether this many bytes are on disk, wherever in the file."""
        while self.found < n_bytes and self._looked_until < self.size:
            try:
                begin = os.lseek(self._descriptor, self._looked_until, os.SEEK_DATA)
                end = os.lseek(self._descriptor, begin, os.SEEK_HOLE)
            except OSError as error:
                # No more data; or the file system cannot tell.
                begin = self.size if error.errno == errno.ENXIO else self._looked_until
                end = self.size
            self.found += max(0, min(end, self.size) - begin)
            self._looked_until = max(end, self._looked_until + 1)
        return self.found >= n_bytes
