"""How many of a file's bytes are on disk; the rest are holes, which read as zeros."""

from __future__ import annotations

import errno
import os


class DataOnDisk:
    """Counts the bytes of an open file that are data, from its beginning and only as far as a caller asks.

    A file system that has no holes reports all bytes as data.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self._descriptor = descriptor
        self.size = size
        self.found = 0
        """Bytes of data that were found so far."""
        self._looked_until = 0

    def has(self, n_bytes: int) -> bool:
        """Whether at least `n_bytes` of the file are on disk, no matter where in it."""
        while self.found < n_bytes and self._looked_until < self.size:
            try:
                begin = os.lseek(self._descriptor, self._looked_until, os.SEEK_DATA)
                end = os.lseek(self._descriptor, begin, os.SEEK_HOLE)
            except OSError as error:
                # ENXIO: no more data follows. Any other error: the file system cannot tell, so all is data.
                begin = self.size if error.errno == errno.ENXIO else self._looked_until
                end = self.size
            self.found += max(0, min(end, self.size) - begin)
            self._looked_until = max(end, self._looked_until + 1)
        return self.found >= n_bytes
