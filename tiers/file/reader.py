"""What a file in `modes/` must have: a class `Reader` that is a `FileReader`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from expertier.tiers.config.file_mode import FileMode
from expertier.tiers.file.open_file import OpenFile

if TYPE_CHECKING:
    from expertier.tiers.file.readers import Readers


class RefusedError(Exception):
    """A file cannot be read in this mode, for the reason `why`; `how` names the mode as an adverb.

    It never leaves the file source, which goes over to the page cache.
    """

    def __init__(self, path: Path, how: str, why: str) -> None:
        """Say which file cannot be read how, and why."""
        super().__init__(f"{path} cannot be read {how} ({why})")


@dataclass(frozen=True, slots=True)
class ReadingTerms:
    """What a mode may go by: the bytes that are read again and again, the RAM left over, and a clock in seconds."""

    working_set_bytes: int
    room: Callable[[], int]
    clock: Callable[[], float]


class FileReader(ABC):
    """One way to read a source's files. Thread-safe, except for `close`."""

    n_reads = 0
    """Reads that were completed in this mode; the file source counts them, under its lock."""
    bytes_read = 0
    """The bytes of these reads."""
    mode_changes = 0
    """How often a mode that chooses between others has gone over from one to the other."""
    trial_reads = 0
    """Reads that such a mode did in the other mode, to measure it."""

    @abstractmethod
    def __init__(self, files: Sequence[OpenFile], terms: ReadingTerms, readers: Readers) -> None:
        """Open what the mode needs beside the files' own descriptors.

        Raises `RefusedError` where the file system cannot be read like this. A mode that is made of others gets
        theirs from `readers`.
        """

    @property
    @abstractmethod
    def mode(self) -> FileMode:
        """How reads are done now; never a mode that chooses between others."""

    @property
    @abstractmethod
    def takes_hints(self) -> bool:
        """Whether it helps to tell the kernel which bytes are read next."""

    @abstractmethod
    def read(self, number: int, offset: int, buffer: memoryview) -> FileReader:
        """Fill `buffer` from `offset` of file `number`; return the reader that did it, which counts the read.

        Raises `SourceError` when not all bytes could be read, and `RefusedError` when it turns out that the file
        system cannot be read like this: the buffer's bytes are then undefined.
        """

    @property
    def held_bytes(self) -> int:
        """The memory that the reader holds."""
        return 0

    def close(self) -> None:  # noqa: B027 (most readers hold nothing)
        """Give back what the reader holds, while nothing reads."""
