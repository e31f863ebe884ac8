"""The user's cache folder: each folder in it appears at once and complete, even where another process writes there."""

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
    """Return the cache folder: the one that EXPERTIER_CACHE_DIR names, or the user's own. It may not exist yet."""
    return cache_root(environ)


def make_subfolder(name: str) -> Path:
    """Return a folder in the cache folder, made if need be, that only this user may enter.

    Errors: BuildError, when it cannot be written; ConfigError, when other users can write to it.
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
    """Require that no other user can write to `path` in the cache. Errors: ConfigError, when another user can."""
    require_trusted(path, cache_folder())


@contextmanager
def staging(parent: Path) -> Iterator[Path]:
    """Yield a fresh folder inside `parent`, to be filled and then moved into place; an unmoved folder is removed.

    Errors: BuildError, when the folder cannot be written.
    """
    try:
        with work_folder(".new-", parent) as folder:
            yield folder
    except OSError as error:
        raise _not_writable(parent, error) from error


def move_into_place(folder: Path, target: Path, keep: Callable[[], bool] = lambda: True) -> None:
    """Rename a filled folder to `target`.

    Where another process was first and `target` exists already, `keep` says whether that folder stays; otherwise it is
    replaced.
    """
    keep_from_others(folder)
    try:
        folder.rename(target)
        return
    except OSError:
        if not target.is_dir():
            raise
    if not keep():
        with (
            staging(target.parent) as old,
            interrupts_deferred(),
        ):  # at each moment the old or the new folder exists
            target.rename(old / "replaced")
            folder.rename(target)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file, so that only one of several processes builds.

    Without the lock only time is lost, as the cache stays sound: a file system that cannot lock is no error.
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
