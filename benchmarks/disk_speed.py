"""How fast spans of a file can be read in random order, through the page cache and around it.

    python benchmarks/disk_speed.py FILE [--span-kib 1300 --threads 4 --seconds 3] --json

Prints MiB/s of `direct_first` (O_DIRECT, spans not read before in this run), `direct_again` (the same spans once more:
a virtual disk's host may have kept them) and `buffered` (preadv through the page cache, the file dropped from it
first). Spans do not overlap. A program inside a virtual machine cannot know whether `direct_first` was cold for the
host.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

_ALIGNMENT = 4096


def drop_from_cache(path: str) -> None:
    """Have the kernel forget the file's clean pages; what was just written is written out first."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)  # pages that were just written cannot be dropped before
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def read_spans(
    path: str, offsets: list[int], span_bytes: int, *, threads: int, seconds: float, direct: bool
) -> tuple[float, int]:
    """Read spans in order until the time is over; returns MiB/s and how many were read."""
    flags = os.O_RDONLY | (os.O_DIRECT if direct else 0)
    lock, place = threading.Lock(), 0
    start = time.perf_counter()

    def work() -> int:
        nonlocal place
        descriptor = os.open(path, flags)
        buffer = mmap.mmap(-1, span_bytes)
        done = 0
        try:
            if not direct:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
            while time.perf_counter() - start < seconds:
                with lock:
                    if place == len(offsets):
                        break
                    offset = offsets[place]
                    place += 1
                got = os.preadv(descriptor, [buffer], offset)
                assert got == span_bytes, f"{got} of {span_bytes} bytes at {offset}"
                done += 1
        finally:
            os.close(descriptor)
            buffer.close()
        return done

    with ThreadPoolExecutor(threads) as pool:
        count = sum(pool.map(lambda _: work(), range(threads)))
    return count * span_bytes / (time.perf_counter() - start) / (1 << 20), count


def measure(path: str, *, span_bytes: int, threads: int, seconds: float) -> dict[str, float]:
    """Measure the three speeds, in MiB/s."""
    span_bytes = -(-span_bytes // _ALIGNMENT) * _ALIGNMENT
    n_spans = Path(path).stat().st_size // span_bytes
    order = (np.random.default_rng().permutation(n_spans) * span_bytes).tolist()
    limits = {"span_bytes": span_bytes, "threads": threads, "seconds": seconds}
    drop_from_cache(path)
    first, count = read_spans(path, order, **limits, direct=True)
    again, _ = read_spans(path, order[:count], **limits, direct=True)
    drop_from_cache(path)
    buffered, _ = read_spans(path, order[:count], **limits, direct=False)
    drop_from_cache(path)
    return {"direct_first": first, "direct_again": again, "buffered": buffered}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file")
    parser.add_argument("--span-kib", type=int, default=1300)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    speeds = measure(
        options.file, span_bytes=options.span_kib << 10, threads=options.threads, seconds=options.seconds
    )
    if options.json:
        print(json.dumps(speeds))
        return
    for name, speed in speeds.items():
        print(f"{name:13} {speed:8.0f} MiB/s")


if __name__ == "__main__":
    main()
