"""Measures whether a kernel or the driver's copies bring experts into a GPU faster."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from expertier.hip.device import Moves
from expertier.hip.driver.gpu import Gpu
from expertier.hip.driver.memory import DeviceBuffer, PinnedBuffer
from expertier.hip.driver.runtime import Stream
from expertier.hip.gpu.moves.mover import Mover
from expertier.units import KIB, MIB

COUNTS = (1, 2, 4, 8, 24)
SIZES = (256 * KIB, 512 * KIB, MIB, 2 * MIB, 4 * MIB, 8 * MIB)
MOST_BYTES = 16 * MIB
_ROUNDS = 4


@dataclass(frozen=True, slots=True)
class Timing:
    """The times of copying `count` pieces of `n_bytes` both ways, in seconds from the call until all bytes are there.

    Each time is the shortest of several rounds: with the driver's copies (`copies_s`) and with a kernel (`gather_s`).
    """

    count: int
    n_bytes: int
    copies_s: float
    gather_s: float


class CopyChoice:
    """Tells which way is faster for a number of pieces and their size, by the measurement that is nearest to them."""

    def __init__(self, timings: list[Timing]) -> None:
        """Use these measurements, at least one."""
        self.timings = timings
        self._points = np.log2([[timing.count, timing.n_bytes] for timing in timings])
        self._gather = [timing.gather_s < timing.copies_s for timing in timings]

    def gather_is_faster(self, count: int, n_bytes: int) -> bool:
        """Whether one launch of the kernel is faster than `count` copies of about `n_bytes` each."""
        distance = np.abs(self._points - np.log2([max(1, count), max(1, n_bytes)])).sum(axis=1)
        return self._gather[int(distance.argmin())]


def measure_copies(
    gpu: Gpu, mover: Mover, copies: Callable[[Moves, int], None], most_bytes: int = MOST_BYTES
) -> CopyChoice:
    """Time both ways for `COUNTS` pieces of `SIZES`, as far as the pieces together have at most `most_bytes`.

    At least one piece of 256 KiB is timed. `most_bytes` of pinned and of device memory are taken meanwhile. Raises
    `DriverError`.
    """
    most_bytes = max(most_bytes, min(SIZES))
    timings = []
    with (
        PinnedBuffer(gpu, most_bytes) as source,
        DeviceBuffer(gpu, most_bytes) as target,
        Stream(gpu, low_priority=False) as stream,
    ):
        for count in COUNTS:
            for n_bytes in SIZES:
                if count * n_bytes > most_bytes:
                    continue
                offsets = np.arange(count, dtype=np.int64) * n_bytes
                sizes = np.full(count, n_bytes)
                rows = np.stack([target.address + offsets, source.address + offsets, sizes], axis=1)
                timings.append(
                    Timing(count, n_bytes, _least(copies, rows, stream), _least(mover.gather, rows, stream))
                )
    return CopyChoice(timings)


def _least(way: Callable[[Moves, int], None], rows: Moves, stream: Stream) -> float:
    times = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        way(rows, stream.handle)
        stream.synchronize()
        times.append(time.perf_counter() - start)
    return min(times)
