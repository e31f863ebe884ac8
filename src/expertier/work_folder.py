"""Folders for work in progress: removed when the work ends, and where its process was killed, by the next one.

While the work goes on its folder is locked. The system gives the lock back with the process, however that ends: so
one that lies there for a while and is not locked is nobody's.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from expertier.interrupts import interrupts_deferred

_ABANDONED_S = 3600
"""How old a folder has to be: a file system that cannot lock, or an older release, may have one that is in use."""


@contextmanager
def work_folder(prefix: str, parent: Path, *, is_shared: bool = False) -> Iterator[Path]:
    """Give a fresh folder in `parent`, which `is_shared` with other programs or ours; it is gone after the block.

    Its content may have been moved away by then, or all of it. Others of the same `prefix` and of this user that
    their processes have left behind are removed first. Raises `OSError` where none can be made.
    """
    # Among others' folders only the process number tells that a name such as "expertier-demo-mymodels" is not ours.
    number = r"\d+-" if is_shared else r"(\d+-)?"
    _remove_abandoned(re.compile(re.escape(prefix) + number + r"[a-z0-9_]{8}"), parent)
    folder: Path | None = None
    lock: int | None = None
    try:
        with interrupts_deferred():
            folder = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=parent))
            lock = _lock(folder)
        yield folder
    finally:
        with interrupts_deferred():
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
            if lock is not None:
                os.close(lock)


def _remove_abandoned(ours: re.Pattern[str], parent: Path) -> None:
    """Remove what killed processes have left under names of ours; where that fails it stays."""
    with suppress(OSError):
        for folder in parent.iterdir():
            if ours.fullmatch(folder.name) and _is_old(folder):
                with suppress(OSError), interrupts_deferred():
                    lock = _lock(folder, wants_it=True)
                    try:
                        shutil.rmtree(folder, ignore_errors=True)
                    finally:
                        os.close(lock)


def _is_old(folder: Path) -> bool:
    try:
        found = folder.lstat()
    except OSError:
        return False
    age_s = time.time() - found.st_mtime
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and age_s > _ABANDONED_S


def _lock(folder: Path, *, wants_it: bool = False) -> int:
    """Lock a folder and return the descriptor that holds the lock; with `wants_it` raise OSError where that fails."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        if wants_it:
            os.close(descriptor)
            raise
    return descriptor
