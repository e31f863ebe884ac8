"""How fast a file is read: from the page cache, and from the disk without it."""

from __future__ import annotations

import mmap
import os
import random
import time
from dataclasses import dataclass
from pathlib import Path

from expertier.units import MIB

CHUNK_BYTES = 2 * MIB
"""The size of one read, about that of an expert's matrix."""

_MOST_BYTES = 192 * MIB
_MOST_S = 1.5


@dataclass(frozen=True, slots=True)
class FileRates:
    """Bytes a second. A rate is None where the file system has no such reads, or the file is too small."""

    page_cache: float | None
    disk_cold: float | None
    disk_direct: float | None


def measure_file(path: Path) -> FileRates:
    """Read places of `path` in random order, at most some seconds; the file is not written.

    Cold reads drop the pages of the file from the page cache first. Raises `OSError` where it cannot be read.
    """
    size = path.stat().st_size
    places = list(range(min(size, 1 << 40) // CHUNK_BYTES))
    random.Random(0).shuffle(places)
    places = places[: _MOST_BYTES // CHUNK_BYTES]
    if len(places) < 4:
        return FileRates(None, None, None)
    buffer = memoryview(mmap.mmap(-1, CHUNK_BYTES))
    with open(path, "rb", buffering=0) as file:
        for place in (
            places
        ):  # pages that were just written are dirty, and must reach the disk before they are dropped
            os.posix_fadvise(file.fileno(), place * CHUNK_BYTES, CHUNK_BYTES, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        cold = _rate(file.fileno(), places, buffer)
        warm_places = places[: max(len(places) // 3, 4)]
        _rate(file.fileno(), warm_places, buffer)
        warm = _rate(file.fileno(), warm_places, buffer)
    return FileRates(warm, cold, _direct_rate(path, places, buffer))


def _direct_rate(path: Path, places: list[int], buffer: memoryview) -> float | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return None
    try:
        return _rate(descriptor, places, buffer)
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _rate(descriptor: int, places: list[int], buffer: memoryview) -> float:
    """Return the bytes a second of reads one after another, for some seconds at most."""
    start, n_bytes = time.perf_counter(), 0
    for place in places:
        n_bytes += os.preadv(descriptor, [buffer], place * CHUNK_BYTES)
        if time.perf_counter() - start > _MOST_S:
            break
    return n_bytes / max(time.perf_counter() - start, 1e-9)
