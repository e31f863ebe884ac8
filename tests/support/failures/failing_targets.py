"""Places that cannot be written to, each in its own way."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


@contextmanager
def full(_folder: Path) -> Iterator[Path]:
    """A folder where no file can grow beyond a few bytes; stands for a full disk where nothing can be mounted."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    try:
        yield _folder
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def missing(folder: Path) -> Iterator[Path]:
    """A folder that is not there."""
    yield folder / "missing"


@contextmanager
def read_only(folder: Path) -> Iterator[Path]:
    """A folder that cannot be written: by its mode, or for root, who may write anyway, mounted so."""
    if os.getuid() != 0:
        folder.chmod(0o500)
        try:
            yield folder
        finally:
            folder.chmod(0o700)
        return
    with mounted(folder, "ro") as there:
        yield there


@contextmanager
def full_disk(folder: Path) -> Iterator[Path]:
    """A disk of 64 KiB without a byte left."""
    with mounted(folder, "size=64k") as there:
        with suppress(OSError), open(there / "filling", "wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        yield there
        left = [path for path in there.rglob("*") if path.is_file() and path.stat().st_size]
        assert left == [there / "filling"], "something was left behind"


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    """Mount an empty file system; skip the test where that is not allowed."""
    try:
        made = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder],
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )
    except OSError as error:
        pytest.skip(f"no mount: {error}")
    if made.returncode != 0:
        pytest.skip(f"mounting is not allowed here: {made.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True, timeout=30)
