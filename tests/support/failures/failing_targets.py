"""Places that cannot be written to, each in its own way, and the command line in this process."""

from __future__ import annotations

import io
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest

from expertier.cli.app import main


@dataclass(frozen=True)
class Ended:
    """How a command ended and what it printed."""

    status: int
    out: str
    err: str

    def must_refuse(self, *words: object) -> None:
        """Assert status 2 and one message of ours that has `words` in it."""
        assert self.status == 2, self
        assert "Traceback" not in self.err
        assert self.err.count("error:") == 1, self.err
        for word in words:
            assert str(word) in self.err, self.err


def command(*arguments: object, stdout: IO[str] | None = None, stderr: IO[str] | None = None) -> Ended:
    """Run `expertier ARGUMENTS` in this process, its streams in memory unless they are given."""
    out, err = stdout or io.StringIO(), stderr or io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["expertier", *map(str, arguments)])
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", err)
        with pytest.raises(SystemExit) as ended:
            main()
    said = [stream.getvalue() if isinstance(stream, io.StringIO) else "" for stream in (out, err)]
    return Ended(int(ended.value.code or 0), *said)


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
