"""The readers of one source, by the names of their modes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import cast

from expertier.tiers.config.file_mode import FileMode
from expertier.tiers.file.open_file import OpenFile
from expertier.tiers.file.reader import FileReader, ReadingTerms


class Readers:
    """Opens the reader of a mode when it is first asked for, and closes all readers. For one thread at a time."""

    def __init__(self, files: Sequence[OpenFile], terms: ReadingTerms) -> None:
        """Open nothing yet; `files` may still grow until the first reader is opened."""
        self._files = files
        self._terms = terms
        self._opened: dict[FileMode, FileReader] = {}

    def open(self, mode: FileMode) -> FileReader:
        """Return the reader of `mode`. Raises what opening it raises: `RefusedError` or `SourceError`."""
        reader = self._opened.get(mode)
        if reader is None:
            kind = cast("type[FileReader]", import_module(mode.module).Reader)
            reader = self._opened[mode] = kind(self._files, self._terms, self)
        return reader

    def __iter__(self) -> Iterator[FileReader]:
        """Iterate over the readers that were opened."""
        return iter(self._opened.values())

    def close(self) -> None:
        """Close all readers; no read may be running."""
        for reader in self:
            reader.close()
