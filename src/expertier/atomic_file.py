"""Files written atomically: completely or not at all. A file is written under another name, and renamed at the end."""

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
"""The names of files that are being written begin with this."""


@contextmanager
def writing_atomically(path: str | os.PathLike[str], *, durable: bool = True) -> Iterator[Path]:
    """Yield the name to write to; that file becomes `path` where the block ends well, and is removed where it raises.

    The file at `path` stays until then; where `path` is a link, the file that it leads to is replaced. With `durable`
    the bytes are on the disk before the name changes. Raises `OSError`; errors of the block are raised unchanged.
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
    """Do as `writing_atomically` does, for a file that the user asked for; `what` names it, such as "the profile".

    Raises ConfigError where the file cannot be written; it says which file, why, and what to do.
    """
    try:
        with writing_atomically(path) as unfinished:
            yield unfinished
    except OSError as error:
        raise ConfigError(_message(path, what, error)) from error


def check_output(path: str | os.PathLike[str], what: str) -> None:
    """Raise ConfigError where a file cannot be written at `path`, before work is done for it. Leaves no file behind."""
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


def write_atomically(path: Path, content: bytes, *, durable: bool = False) -> None:
    """Write a file completely or not at all, also where another process writes it. Raises `OSError`."""
    with writing_atomically(path, durable=durable) as unfinished, unfinished.open("xb") as file:
        file.write(content)


def _message(path: str | os.PathLike[str], what: str, error: OSError) -> str:
    return f"{what} cannot be written to {os.fspath(path)}: {reason(error)}; {remedy(error)}"


def _refuse_device(target: Path) -> None:
    """Refuse a folder, a device or a pipe: a rename would replace it by a file."""
    try:
        mode = target.stat().st_mode
    except FileNotFoundError:
        return
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(21, "it is a folder", str(target))
    if not stat.S_ISREG(mode):
        raise OSError(
            22, "it is no file but a device or a pipe, which writing this file would replace", str(target)
        )
