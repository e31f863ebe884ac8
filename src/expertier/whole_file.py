"""Files that appear whole or not at all: written beside their place under another name, and renamed at the end."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from expertier.errors import ConfigError
from expertier.failures import reason, remedy

PREFIX = ".unfinished-"
"""What the names of files begin with that are being written."""


@contextmanager
def whole(path: str | os.PathLike[str], *, durable: bool = True) -> Iterator[Path]:
    """Yield the name to write to; it becomes `path` where the block ends well, and is removed where it does not.

    What `path` held stays until then; of a link it is what that leads to. With `durable` the bytes are on the disk
    before the name changes. Raises `OSError`: the block's own too, as it is.
    """
    target = Path(os.path.realpath(path))
    _refuse_device(target)
    unfinished = target.with_name(f"{PREFIX}{os.getpid()}-{secrets.token_hex(4)}")
    try:
        yield unfinished
        if durable:
            with unfinished.open("rb") as written:
                os.fsync(written.fileno())
        unfinished.replace(target)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise


@contextmanager
def output(path: str | os.PathLike[str], what: str) -> Iterator[Path]:
    """Do as `whole` does for what a user asked for, such as "the profile".

    Raises ConfigError where the file cannot be written: which, why, and what to do.
    """
    try:
        with whole(path) as unfinished:
            yield unfinished
    except OSError as error:
        raise ConfigError(_message(path, what, error)) from error


def check_output(path: str | os.PathLike[str], what: str) -> None:
    """Raise ConfigError where a file cannot be written at `path`, before anything is done for it. Nothing is left."""
    target = Path(os.path.realpath(path))
    try:
        _refuse_device(target)
        trial = target.with_name(f"{PREFIX}{os.getpid()}-{secrets.token_hex(4)}")
        try:
            trial.touch()
        finally:
            trial.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(_message(path, what, error)) from error


def write_whole(path: Path, content: bytes, *, durable: bool = False) -> None:
    """Write a file whole or not at all, whoever else writes it. Raises `OSError`."""
    with whole(path, durable=durable) as unfinished, unfinished.open("xb") as file:
        file.write(content)


def _message(path: str | os.PathLike[str], what: str, error: OSError) -> str:
    return f"{what} cannot be written to {os.fspath(path)}: {reason(error)}; {remedy(error)}"


def _refuse_device(target: Path) -> None:
    """Refuse what a rename would replace by a file: a folder, a device, a pipe."""
    try:
        mode = target.stat().st_mode
    except FileNotFoundError:
        return
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(21, "it is a folder", str(target))
    if not stat.S_ISREG(mode):
        raise OSError(
            22, "it is no file but a device or a pipe, which a file written whole would replace", str(target)
        )
