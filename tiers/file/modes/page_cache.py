"""Reads through the kernel's page cache."""

from __future__ import annotations

from collections.abc import Sequence

from expertier.tiers.config.file_mode import FileMode
from expertier.tiers.file.open_file import OpenFile
from expertier.tiers.file.reader import FileReader, ReadingTerms
from expertier.tiers.file.readers import Readers


class Reader(FileReader):
    """Reads through the files' own descriptors, which works on every file system."""

    mode = FileMode.PAGE_CACHE
    takes_hints = True

    def __init__(self, files: Sequence[OpenFile], terms: ReadingTerms, readers: Readers) -> None:
        """Use the open files as they are."""
        del terms, readers
        self._files = files

    def read(self, number: int, offset: int, buffer: memoryview) -> FileReader:
        """Fill `buffer`."""
        self._files[number].read(offset, buffer)
        return self
