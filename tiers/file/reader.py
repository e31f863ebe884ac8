"""The base class of all ways to read: each file in `modes/` has a class `Reader` that is a `FileReader`."""

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
    """A file cannot be read in this mode.

    The file source catches it and reads through the page cache from then on, so that no caller sees it.
    """

    def __init__(self, path: Path, how: str, why: str) -> None:
        """Name the file, the mode as an adverb (`how`), and the reason (`why`)."""
        super().__init__(f"{path} cannot be read {how} ({why})")


@dataclass(frozen=True, slots=True)
class ReadingTerms:
    """What a mode may take into account.

    `working_set_bytes` are the bytes that are read again and again, `room` returns the bytes of free RAM, and `clock`
    the time in seconds.
    """

    working_set_bytes: int
    room: Callable[[], int]
    clock: Callable[[], float]


class FileReader(ABC):
    """One way to read a source's files. Thread-safe, except for `close`."""

    n_reads = 0
    """Reads that were completed in this mode; `InFlightReads` counts them under its lock."""
    bytes_read = 0
    """The bytes of these reads."""
    mode_changes = 0
    """How often a mode that chooses between two other modes has changed its choice."""
    trial_reads = 0
    """Reads that such a mode did in the mode that it does not use now, in order to measure that mode."""

    @abstractmethod
    def __init__(self, files: Sequence[OpenFile], terms: ReadingTerms, readers: Readers) -> None:
        """Open what the mode needs beside the files' own descriptors.

        A mode that uses other modes' readers gets them from `readers`. Raises `RefusedError` where the file system does
        not support this mode.
        """

    @property
    @abstractmethod
    def mode(self) -> FileMode:
        """The mode of reads at this moment; never a mode that chooses between other modes."""

    @property
    @abstractmethod
    def takes_hints(self) -> bool:
        """Whether it helps to tell the kernel which bytes are read next."""

    @abstractmethod
    def read(self, number: int, offset: int, buffer: memoryview) -> FileReader:
        """Fill `buffer` from `offset` of file `number`; return the reader that did it, in which the read is counted.

        Raises `SourceError` where not all bytes could be read, and `RefusedError` where it turns out that the file
        system does not support this mode. The buffer's bytes are then undefined.
        """

    @property
    def held_bytes(self) -> int:
        """The bytes of memory that the reader holds."""
        return 0

    def close(self) -> None:  # noqa: B027 (most readers hold nothing)
        """Give back what the reader holds; no read may be running."""
