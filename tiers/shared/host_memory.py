"""How much memory this process may still take."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import psutil

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")


def available_bytes(cgroup_root: Path = _CGROUP_ROOT, own_cgroup: Path = _OWN_CGROUP) -> int:
    """Return the bytes that this process can allocate without swapping or being killed.

    This is the smallest of these numbers: what the machine has available, and what each control group around this
    process (version 1 or 2) has left. Pages of the file cache that no process uses count as available in both.
    """
    available = machine_available_bytes()
    for folder, limit, usage, cache_key in _groups(cgroup_root, own_cgroup):
        allowed = _number(folder / limit)
        used = _number(folder / usage)
        if allowed is not None and used is not None:
            available = min(available, allowed - used + _cached(folder / "memory.stat", cache_key))
    return max(available, 0)


def machine_available_bytes() -> int:
    """Return the bytes that the machine has available; without /proc, the bytes of unused memory only."""
    try:
        return int(psutil.virtual_memory().available)
    except OSError:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def total_bytes() -> int:
    """Return the bytes of RAM that the machine has."""
    try:
        return int(psutil.virtual_memory().total)
    except OSError:  # there is no /proc
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _groups(root: Path, own: Path) -> Iterator[tuple[Path, str, str, str]]:
    """Yield each control group's folder, its files for limit and usage, and the key of its unused file cache."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        below = PurePosixPath(path.lstrip("/"))
        if controllers == "":
            for parent in (below, *below.parents):
                yield root / parent, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            for parent in (below, *below.parents):
                folder = root / "memory" / parent
                yield folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"


def _number(path: Path) -> int | None:
    """Read a file that holds one number; None where the file is missing or says `max`."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _cached(path: Path, key: str) -> int:
    try:
        for line in path.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == key:
                return int(value)
    except (OSError, ValueError):
        pass
    return 0
