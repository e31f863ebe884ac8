"""Copies into the device: what they cost over bare driver calls, beside filling, and as one kernel."""

from __future__ import annotations

import ctypes
import statistics
import threading
from typing import Any

import numpy as np

from device_costs.rounds import ratios, spread, timed
from expertier.hip.driver.bindings import CALLS
from expertier.hip.gpu.device import GpuDevice
from expertier.units import KIB, MIB

COPY_SIZES = (512 * KIB, MIB, 3 * 512 * KIB, 2 * MIB, 4 * MIB, 8 * MIB)
GATHER_COUNTS = (1, 2, 4, 8, 24)
GATHER_SIZES = (512 * KIB, MIB, 2 * MIB, 4 * MIB, 8 * MIB)
CHUNKS = (8 * KIB, 16 * KIB, 32 * KIB, 64 * KIB)


def measure_copies(device: GpuDevice, rounds: int, total: int) -> list[dict[str, Any]]:
    """Copy `total` bytes in pieces, through `copy_in` and through the bare driver function."""
    bare = getattr(ctypes.CDLL(device.gpu.driver.path), CALLS["copy_in"][device.gpu.driver.traits.column])
    bare.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    stream = device.create_stream()
    source, target = device.alloc_pinned(total), device.alloc(total)
    ctypes.memset(source, 1, total)
    found = []
    for size in COPY_SIZES:
        offsets = range(0, total - size + 1, size)

        def through_device(offsets: range = offsets, size: int = size) -> None:
            for offset in offsets:
                device.copy_in(target + offset, source + offset, size, stream)
            device.gpu.call("stream_synchronize", stream)

        def by_driver(offsets: range = offsets, size: int = size) -> None:
            for offset in offsets:
                bare(target + offset, source + offset, size, stream)
            device.gpu.call("stream_synchronize", stream)

        with device.gpu.current():
            times = timed(rounds, through_device, by_driver)
        copied = size * len(offsets)
        found.append(
            {
                "bytes": size,
                "device_gb_s": statistics.median(copied / value / 1e9 for value in times[0]),
                "driver_gb_s": statistics.median(copied / value / 1e9 for value in times[1]),
                "speed_of_driver": ratios(times),
            }
        )
    device.free(source)
    device.free(target)
    device.destroy_stream(stream)
    return found


def measure_overlap(device: GpuDevice, rounds: int, total: int, block: int = 2 * MIB) -> dict[str, Any]:
    """Fill pinned blocks by memory copy and copy them in: each alone, then pipelined through all blocks."""
    n = total // block
    pageable = np.ones(total, np.uint8)
    pinned, target = device.alloc_pinned(total), device.alloc(total)
    stream = device.create_stream()
    begins = [i * block for i in range(n)]

    def fill() -> None:
        for begin in begins:
            ctypes.memmove(pinned + begin, pageable.ctypes.data + begin, block)

    def copy() -> None:
        for begin in begins:
            device.copy_in(target + begin, pinned + begin, block, stream)
        device.gpu.call("stream_synchronize", stream)

    def both() -> None:
        filled = [threading.Event() for _ in begins]

        def fill_in_thread() -> None:
            for begin, event in zip(begins, filled, strict=True):
                ctypes.memmove(pinned + begin, pageable.ctypes.data + begin, block)
                event.set()

        thread = threading.Thread(target=fill_in_thread)
        thread.start()
        for begin, event in zip(begins, filled, strict=True):
            event.wait()
            device.copy_in(target + begin, pinned + begin, block, stream)
        device.gpu.call("stream_synchronize", stream)
        thread.join()

    times = timed(rounds, fill, copy, both)
    hidden = [
        (fill_s + copy_s - both_s) / min(fill_s, copy_s)
        for fill_s, copy_s, both_s in zip(*times, strict=True)
    ]
    device.free(pinned)
    device.free(target)
    device.destroy_stream(stream)
    names = ("fill", "copy", "both")
    speeds = {
        f"{name}_gb_s": total / statistics.median(found) / 1e9
        for name, found in zip(names, times, strict=True)
    }
    over_longer = [both_s / max(fill_s, copy_s) for fill_s, copy_s, both_s in zip(*times, strict=True)]
    return {
        "bytes": total,
        "block_bytes": block,
        **speeds,
        "share_of_the_shorter_hidden": spread(hidden, 1),
        "both_over_the_longer": spread(over_longer, 1),
    }


def measure_gather(device: GpuDevice, rounds: int, most: int) -> list[dict[str, Any]]:
    """Bring scattered experts into slots with one launch, and with a copy each; from the call to done."""
    if not device.mover.kernels:
        return []
    stream = device.create_stream()
    source, target = device.alloc_pinned(most), device.alloc(most)
    ctypes.memset(source, 1, most)
    found = []
    for size in GATHER_SIZES:
        for count in GATHER_COUNTS:
            if count * size > most:
                continue
            order = np.random.default_rng(count).permutation(most // size)[:count].astype(np.int64)
            slots = np.arange(count, dtype=np.int64)
            moves = np.stack([target + slots * size, source + order * size, np.full(count, size)], axis=1)

            def copies(moves: np.ndarray = moves) -> None:
                for to, origin, n_bytes in moves.tolist():
                    device.gpu.call("copy_in", to, origin, n_bytes, stream)
                device.gpu.call("stream_synchronize", stream)

            def gather(moves: np.ndarray = moves, chunk: int = 0) -> None:
                device.mover.gather(moves, stream, chunk_bytes=chunk)
                device.gpu.call("stream_synchronize", stream)

            ways = [lambda chunk=chunk, gather=gather: gather(chunk=chunk) for chunk in CHUNKS]
            times = timed(rounds, copies, *ways)
            best = min(range(len(CHUNKS)), key=lambda i: statistics.median(times[1 + i]))
            found.append(
                {
                    "experts": count,
                    "bytes": size,
                    "copies_us": spread(times[0], 1e6),
                    "gather_us": {
                        str(chunk): spread(values, 1e6)
                        for chunk, values in zip(CHUNKS, times[1:], strict=True)
                    },
                    "best_chunk": CHUNKS[best],
                    "gather_over_copies": ratios([times[0], times[1 + best]]),
                }
            )
    device.free(source)
    device.free(target)
    device.destroy_stream(stream)
    return found
