"""Reads past the page cache, with O_DIRECT."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence

from expertier.errors import SourceError
from expertier.tiers.config.file_mode import FileMode
from expertier.tiers.file.dio_alignment import DioAlignment, dio_alignment
from expertier.tiers.file.direct_reader import DirectReader
from expertier.tiers.file.open_file import OpenFile
from expertier.tiers.file.reader import FileReader, ReadingTerms, RefusedError
from expertier.tiers.file.readers import Readers
from expertier.tiers.file.scratch import ScratchPool
from expertier.units import MIB

_SCRATCH_BYTES = 4 * MIB  # holds most expert matrices in one piece; unused pages of it take no memory
_NOT_DIRECT = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS})  # no direct reads, or none so aligned
_HOW = "directly"


class Reader(FileReader):
    """Reads whole blocks through a second descriptor of each file, with aligned scratch memory for their ends."""

    mode = FileMode.DIRECT
    takes_hints = False

    def __init__(self, files: Sequence[OpenFile], terms: ReadingTerms, readers: Readers) -> None:
        """Open each file once more, and prepare the scratch memory."""
        del terms, readers
        self._files = files
        self._readers: list[DirectReader] = []
        alignments = [self._open(file) for file in files]
        memory = max(alignment.memory for alignment in alignments)
        block = max(memory, *(alignment.offset for alignment in alignments))
        self._scratch = ScratchPool(max(_SCRATCH_BYTES, 2 * block), memory)

    def read(self, number: int, offset: int, buffer: memoryview) -> FileReader:
        """Fill `buffer`. Raises `RefusedError` where the file system refuses direct reads after all."""
        if not buffer:
            return self
        file, reader = self._files[number], self._readers[number]
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        with self._scratch.block() as block:
            try:
                file.fill(
                    offset,
                    buffer,
                    lambda done: reader.read(offset + done, buffer[done:], address + done, block),
                )
            except SourceError as error:
                if _refusal(error) is None:
                    raise
                raise RefusedError(file.file.path, _HOW, "the file system refuses such reads") from error
        return self

    @property
    def held_bytes(self) -> int:
        """The bytes of scratch memory."""
        return self._scratch.n_bytes

    def close(self) -> None:
        """Give the scratch memory back."""
        self._scratch.close()

    def _open(self, file: OpenFile) -> DioAlignment:
        try:
            descriptor = file.open_again(os.O_DIRECT)
        except SourceError as error:
            why = _refusal(error)
            if why is None:
                raise
            raise RefusedError(file.file.path, _HOW, why) from error
        alignment = dio_alignment(descriptor)
        if alignment is None:
            raise RefusedError(file.file.path, _HOW, "the file system has no direct reads")
        self._readers.append(DirectReader(descriptor, alignment))
        return alignment


def _refusal(error: SourceError) -> str | None:
    """Return the reason where `error` means that the file system has no direct reads; None for other errors."""
    cause = error.__cause__
    if isinstance(cause, OSError) and cause.errno in _NOT_DIRECT:
        return f"{cause.strerror} (errno {cause.errno})"
    return None
