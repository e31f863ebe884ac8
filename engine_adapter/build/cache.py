"""The user's cache folder: whole folders that appear at once, whoever else writes there."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from expertier.cache_root import CACHE_VARIABLE, cache_root
from expertier.errors import BuildError
from expertier.interrupts import interrupts_deferred
from expertier.trusted_folder import keep_from_others, make_private_folder, require_trusted
from expertier.work_folder import work_folder


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the cache folder: what EXPERTIER_CACHE_DIR says, or the user's own. It may not exist yet."""
    return cache_root(environ)


def make_subfolder(name: str) -> Path:
    """Return a folder in the cache folder, made if need be, that only this user may enter.

    Errors: BuildError, when it cannot be written; ConfigError, when others can write to it.
    """
    folder = cache_folder() / name
    try:
        make_private_folder(folder, cache_folder())
    except OSError as error:
        raise _not_writable(folder, error) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise _not_writable(folder, "permission denied")
    return folder


def require_trusted_cache(path: Path) -> None:
    """Require that nobody else could write to a part of the cache. Errors: ConfigError, when somebody could."""
    require_trusted(path, cache_folder())


@contextmanager
def staging(parent: Path) -> Iterator[Path]:
    """Give a fresh folder inside `parent`, to be filled and then moved into place; removed if it was not.

    Errors: BuildError, when the folder cannot be written.
    """
    try:
        with work_folder(".new-", parent) as folder:
            yield folder
    except OSError as error:
        raise _not_writable(parent, error) from error


def move_into_place(folder: Path, target: Path, keep: Callable[[], bool] = lambda: True) -> None:
    """Rename a filled folder to `target`.

    Where a folder is there already, as another process was first, `keep` is asked whether that one stays; if
    not, it is replaced.
    """
    keep_from_others(folder)
    try:
        folder.rename(target)
        return
    except OSError:
        if not target.is_dir():
            raise
    if not keep():
        with staging(target.parent) as old, interrupts_deferred():  # there is always one of the two
            target.rename(old / "replaced")
            folder.rename(target)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file, so that of several processes only one builds.

    Only time depends on the lock, never what is in the cache: a file system that cannot lock is no error.
    """
    with ExitStack() as stack:
        with suppress(OSError):
            file = stack.enter_context(path.open("ab"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file gives the lock back


def _not_writable(folder: Path, reason: object) -> BuildError:
    return BuildError(
        f"the cache folder {folder} cannot be written: {reason}; set {CACHE_VARIABLE} to a folder of yours"
    )
