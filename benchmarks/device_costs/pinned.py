"""What a pinned block takes of the process and of the machine, beside what is counted for it."""

from __future__ import annotations

import ctypes
import mmap
import time
from pathlib import Path
from typing import Any

from expertier.hip.gpu.device import GpuDevice
from expertier.units import KIB, MIB

PINNED_SIZES = (8 * KIB, 516 * KIB, 3 * 512 * KIB, 3 * MIB + 4 * KIB)


def measure_pinned(device: GpuDevice, blocks: int) -> list[dict[str, Any]]:
    """Pin and touch blocks: the memory that process and machine lose for each block, beside the counted bytes."""
    found = []
    for size in PINNED_SIZES:
        before = _memory()
        start = time.perf_counter()
        taken = [device.alloc_pinned(size) for _ in range(blocks)]
        seconds = time.perf_counter() - start
        for address in taken:
            ctypes.memset(address, 1, size)
        after = _memory()
        found.append(
            {
                "bytes": size,
                "counted_bytes": device.pinned_bytes / blocks,
                "resident_bytes": (after["resident"] - before["resident"]) / blocks,
                "unavailable_bytes": (before["available"] - after["available"]) / blocks,
                "alloc_us": seconds / blocks * 1e6,
            }
        )
        for address in taken:
            device.free(address)
    return found


def _memory() -> dict[str, int]:
    """Return the bytes that this process has resident and that the machine has available."""
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
    line = next(
        line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable")
    )
    return {"resident": resident, "available": int(line.split()[1]) * KIB}
