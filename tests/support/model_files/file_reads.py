"""Model files as sources: opened in a mode, read, and looked for among the descriptors of this process."""

from __future__ import annotations

import random
from pathlib import Path

from expertier.tiers.config.file_mode import FileMode
from expertier.tiers.file.source import FileSource
from expertier.tiers.model.file_identity import FileIdentity
from expertier.tiers.model.model_file import ModelFile
from expertier.tiers.model.span import Span

SIZE = 100_003
DATA = random.Random(0).randbytes(SIZE)
"""Bytes of a file that no block size divides."""


def as_model_file(path: Path, begin: int = 0) -> ModelFile:
    """The file as it is now, its bytes counted from `begin`."""
    return ModelFile(path, begin, FileIdentity.of(path.stat()))


def open_source(path: Path, mode: FileMode = FileMode.AUTO, **how: object) -> FileSource:
    """A source of one file."""
    return FileSource([as_model_file(path)], mode, **how)  # type: ignore[arg-type]


def read(source: FileSource, offset: int, n_bytes: int) -> bytes:
    """Read some bytes of a source."""
    buffer = bytearray(n_bytes)
    source.read_into(Span(offset, n_bytes), memoryview(buffer))
    return bytes(buffer)


def is_open(path: Path) -> bool:
    """Whether any descriptor of this process is this file."""
    return any(fd.exists() and fd.samefile(path) for fd in Path("/proc/self/fd").iterdir())
