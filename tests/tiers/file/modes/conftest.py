"""Files to read in every mode."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from expertier.tiers.config.file_mode import FileMode
from model_files.file_reads import DATA, open_source, read


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with the bytes of `DATA`, which are on the disk."""
    path = tmp_path / "model.gguf"
    path.write_bytes(DATA)
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return path


@pytest.fixture
def direct_path(path: Path) -> Path:
    """The same file, where its file system has direct reads."""
    source = open_source(path, FileMode.DIRECT)
    try:
        read(source, 1, 1000)
        if source.mode is not FileMode.DIRECT:
            pytest.skip("this file system has no direct reads")
    finally:
        source.close()
    return path
