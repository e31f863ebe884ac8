"""Folders for work in progress: removed when the work ends or, where its process was killed, by the next process.

A folder is locked while the work goes on. The system gives the lock back when the process ends, however it ends. So an
old folder that is not locked was abandoned.
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
"""How old an abandoned folder must be: a younger one may be in use on a file system, or by a release, without locks."""


@contextmanager
def work_folder(prefix: str, parent: Path, *, is_shared: bool = False) -> Iterator[Path]:
    """Yield a fresh folder in `parent`, which other programs may share (`is_shared`); remove it after the block.

    The block may move the folder or its content away. Folders of the same `prefix` and of this user that killed
    processes have left behind are removed first. Raises `OSError` where no folder can be made.
    """
    # In a shared folder only the process number tells that a name such as "expertier-demo-mymodels" is not ours.
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
    """Remove folders under names of ours that killed processes have left, except where removing fails."""
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
