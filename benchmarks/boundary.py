"""How fast does the boundary move, against a plain memmove of the bytes that survive?

    python benchmarks/boundary.py [--arena-gib 2] [--runs 5] [--json]

A host arena of 48 layers of 1.7 MiB experts, all slots taken and written; half of it is reserved for computing and
given back. One run measures two things, which take turns at being first: the full move (choice of survivors, copies,
zeros, tables), and memmoves of as many bytes, in pieces of an expert, within memory of the same size from the same
allocator. All memory was touched before. Numbers are medians; a ratio is taken within one round.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import time

import numpy as np

import expertier as et
from expertier.testing import LayerShape, synthetic_table
from expertier.tiers.model.span import Span
from expertier.units import GIB, MIB

N_LAYERS = 48


class OnesSource:
    """A source of ones: the pages of every slot are touched."""

    def read_into(self, span: Span, buffer: memoryview) -> None:
        """Fill the buffer."""
        ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(buffer)), 1, span.n_bytes)


def memmove_seconds(memory: int, arena_bytes: int, expert_bytes: int, moved_bytes: int) -> float:
    """Move `moved_bytes` in pieces of an expert up by half the arena; highest first, as a boundary would."""
    pieces = moved_bytes // expert_bytes
    begin = time.perf_counter()
    for piece in reversed(range(pieces)):
        source = memory + piece * expert_bytes
        ctypes.memmove(source + arena_bytes // 2, source, expert_bytes)
    return time.perf_counter() - begin


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--arena-gib", type=float, default=2)
    options.add_argument("--runs", type=int, default=5)
    options.add_argument("--json", action="store_true")
    given = options.parse_args()

    arena_bytes = int(given.arena_gib * GIB)
    shape = LayerShape(n_experts=128, n_embd=2048, n_ff=512)
    table = synthetic_table([shape] * N_LAYERS, top_k=8)
    config = et.TierConfig(expert_cache_bytes=arena_bytes, host_pool_bytes=0, fill_threads=0)
    ups, downs, plain, ratios = [], [], [], []
    with (
        et.open_device("host") as device,
        et.TierManager(table, device=device, config=config, source=OnesSource()) as tiers,
    ):
        memory = device.alloc(tiers.arena_bytes)
        ctypes.memset(memory, 1, tiers.arena_bytes)
        expert_bytes = table.layers[0].expert_bytes
        rng = np.random.default_rng(0)
        moved = tiers.arena_bytes // 2 // expert_bytes * expert_bytes
        for number in range(given.runs + 1):
            for layer, n_slots in enumerate(tiers.slots):
                tiers.acquire(layer, rng.permutation(128)[:n_slots]).release()
            if number % 2:
                plain.append(memmove_seconds(memory, arena_bytes, expert_bytes, moved))
            before = tiers.stats().moves
            begin = time.perf_counter()
            tiers.reserve_compute(tiers.arena_bytes // 2)
            ups.append(time.perf_counter() - begin)
            moved = tiers.stats().moves.moved_bytes - before.moved_bytes
            if not number % 2:
                plain.append(memmove_seconds(memory, arena_bytes, expert_bytes, moved))
            tiers.release_compute()
            begin = time.perf_counter()
            tiers.lower_boundary()
            downs.append(time.perf_counter() - begin)
            ratios.append(ups[-1] / plain[-1])
        device.free(memory)
    for values in (ups, downs, plain, ratios):
        del values[0]  # the first move compiles what it needs
    result = {
        "arena_mib": arena_bytes // MIB,
        "survivors_moved_mib": moved // MIB,
        "move_up_ms": round(statistics.median(ups) * 1e3, 2),
        "move_down_ms": round(statistics.median(downs) * 1e3, 2),
        "memmove_ms": round(statistics.median(plain) * 1e3, 2),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_range": [round(min(ratios), 3), round(max(ratios), 3)],
    }
    print(
        json.dumps(result)
        if given.json
        else "\n".join(f"{name:20} {value}" for name, value in result.items())
    )


if __name__ == "__main__":
    main()
