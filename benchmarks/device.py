"""What a GPU device costs over the driver's own calls, side by side on the same GPU.

`python benchmarks/device.py [--device cuda:0] [--json] [--arena-gib 8] [--quick]` measures and prints:

copies     pinned host-to-device copies of an expert's size through the device, against a bare loop of driver calls
boundary   a boundary move with half of the experts surviving, planning included, against one copy of the same bytes:
           a row for each slot, and as the tiers send it, neighbours that move together in one row
pinned     what a pinned block takes, beside what is counted for it
overlap    filling pinned blocks from pageable memory, copying the blocks in, and both at once
gather     one kernel that reads pinned memory, against a driver's copy for each expert

`--planning` times nothing but the planning of the boundary moves, for which it needs no GPU.

Each number is the median of several rounds, with the smallest and the largest.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from expertier.hip import open_device
from expertier.hip.driver.bindings import CALLS
from expertier.hip.gpu.device import GpuDevice
from expertier.hip.gpu.moves.plan import Scratch, plan_moves
from expertier.tiers.slots.moves import order_moves

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
COPY_SIZES = (512 * KIB, MIB, 3 * 512 * KIB, 2 * MIB, 4 * MIB, 8 * MIB)
GATHER_COUNTS = (1, 2, 4, 8, 24)
GATHER_SIZES = (512 * KIB, MIB, 2 * MIB, 4 * MIB, 8 * MIB)
CHUNKS = (8 * KIB, 16 * KIB, 32 * KIB, 64 * KIB)
REPACK_CHUNKS = (16 * KIB, 32 * KIB, 64 * KIB, 128 * KIB)
SLOT_SIZES = (MIB, 3 * 512 * KIB, 4 * MIB)
PINNED_SIZES = (8 * KIB, 516 * KIB, 3 * 512 * KIB, 3 * MIB + 4 * KIB)


def timed(rounds: int, *ways: Callable[[], None]) -> list[list[float]]:
    """Return the seconds of each round of each way; the ways take turns, and the first turn does not count."""
    times: list[list[float]] = [[] for _ in ways]
    for turn in range(rounds + 1):
        for way, found in zip(ways, times, strict=True):
            start = time.perf_counter()
            way()
            if turn:
                found.append(time.perf_counter() - start)
    return times


def spread(values: list[float], scale: float) -> dict[str, float]:
    """Return median, smallest and largest, scaled."""
    scaled = sorted(value * scale for value in values)
    return {"median": statistics.median(scaled), "min": scaled[0], "max": scaled[-1]}


def ratios(times: list[list[float]]) -> dict[str, float]:
    """Return the second way's time over the first one's, round by round."""
    return spread([second / first for first, second in zip(*times, strict=True)], 1)


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


def boundary_moves(base: int, arena: int, slot: int) -> dict[str, np.ndarray]:
    """Return the moves, in two forms, that pack a random half of the slots at the arena's high end."""
    n = arena // slot
    kept = np.sort(np.random.default_rng(slot).choice(n, n // 2, replace=False))[::-1]
    sources, targets = base + kept * slot, base + (n - 1 - np.arange(len(kept))) * slot
    moves = np.stack([targets, sources, np.full(len(kept), slot)], axis=1).astype(np.int64)
    old, new = (np.stack([at[::-1], moves[:, 2], moves[:, 2]], axis=1) for at in (sources, targets))
    return {"a row a slot": moves, "runs of slots": order_moves(old, new)}


def show_planning(rounds: int, arena: int) -> None:
    """Time planning alone, and print it."""
    for slot in SLOT_SIZES:
        for form, moves in boundary_moves(1 << 40, arena, slot).items():
            (times,) = timed(rounds, lambda moves=moves: plan_moves(moves, Scratch(1 << 60, 16 * MIB)))
            found = spread(times, 1e3)
            values = f"{found['median']:.3f} ({found['min']:.3f} to {found['max']:.3f})"
            print(f"  {arena // slot} slots of {slot / MIB} MiB, {form}, {len(moves)} rows: {values} ms")


def measure_boundary(device: GpuDevice, rounds: int, arena: int) -> list[dict[str, Any]]:
    """Pack half of the slots of an arena at its high end; check that each arrived."""
    base, stream = device.alloc(arena), device.create_stream()
    found = []
    for slot in SLOT_SIZES:
        n = arena // slot
        forms = boundary_moves(base, arena, slot)
        targets, sources, _ = next(iter(forms.values())).T
        _number_slots(device, base, slot, n)
        device.copy_within(next(iter(forms.values())), stream)
        device.synchronize()
        arrived = _slot_numbers(device, targets, slot)
        assert (arrived == (sources - base) // slot).all(), "a slot did not arrive"
        for form, moves in forms.items():
            row = {"slot_bytes": slot, "slots": n, "form": form}
            found.append({**row, **_measure_move(device, rounds, base, arena, moves, stream)})
    device.free(base)
    device.destroy_stream(stream)
    return found


def _measure_move(
    device: GpuDevice, rounds: int, base: int, arena: int, moves: np.ndarray, stream: int
) -> dict[str, Any]:
    """Time moves, their planning alone, other chunks of the kernel, and one copy of as many bytes."""
    n_bytes = int(moves[moves[:, 0] != moves[:, 1], 2].sum())
    scratch = Scratch(1 << 60, 16 * MIB)

    def move(chunk: int | None = None) -> None:
        if chunk is None:
            device.copy_within(moves, stream)
        else:
            device.mover.move(moves, stream, chunk_bytes=chunk)
        device.gpu.call("stream_synchronize", stream)

    def copy_once() -> None:
        device.gpu.call("copy_within", base + arena - n_bytes, base, n_bytes, stream)
        device.gpu.call("stream_synchronize", stream)

    times = timed(rounds, copy_once, move, *(lambda chunk=chunk: move(chunk) for chunk in REPACK_CHUNKS))
    (planning,) = timed(rounds, lambda: plan_moves(moves, scratch))
    plan = plan_moves(moves, scratch)
    return {
        "rows": len(moves),
        "pieces": len(plan.rows),
        "moved_bytes": n_bytes,
        "launches": len(plan.ends),
        "one_copy_ms": spread(times[0], 1e3),
        "move_ms": spread(times[1], 1e3),
        "planning_ms": spread(planning, 1e3),
        "move_over_copy": ratios(times[:2]),
        "over_copy_by_chunk": {
            str(chunk): ratios([times[0], values])
            for chunk, values in zip(REPACK_CHUNKS, times[2:], strict=True)
        },
    }


def _number_slots(device: GpuDevice, base: int, slot: int, n: int) -> None:
    """Write each slot's number into its last eight bytes."""
    staging = device.alloc_pinned(8 * n)
    numbers = np.arange(n, dtype=np.int64)  # named: `.ctypes.data` alone would not keep it alive
    ctypes.memmove(staging, numbers.ctypes.data, 8 * n)
    for i in range(n):
        device.copy_in(base + (i + 1) * slot - 8, staging + 8 * i, 8)
    device.synchronize()
    device.free(staging)


def _slot_numbers(device: GpuDevice, slots: np.ndarray, slot: int) -> np.ndarray:
    """Return the numbers in the slots that begin at the addresses `slots`."""
    staging = device.alloc_pinned(8 * len(slots))
    for i, begin in enumerate(slots.tolist()):
        device.copy_out(staging + 8 * i, begin + slot - 8, 8)
    device.synchronize()
    numbers = np.frombuffer(ctypes.string_at(staging, 8 * len(slots)), np.int64)
    device.free(staging)
    return numbers


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


def measure(device: GpuDevice, *, rounds: int, arena: int, total: int) -> dict[str, Any]:
    """Run all of them."""
    gpu = device.gpu
    return {
        "device": {
            "name": device.name,
            "product": gpu.product(),
            "architecture": gpu.architecture(),
            "driver": gpu.driver.traits.version_text(gpu.version),
            "kernels": device.mover.kernels,
            "without_kernels_because": device.mover.without_kernels_because,
        },
        "rounds": rounds,
        "copies": measure_copies(device, rounds, total),
        "boundary": measure_boundary(device, rounds, arena),
        "pinned": measure_pinned(device, 64 if total > 64 * MIB else 4),
        "overlap": measure_overlap(device, rounds, total),
        "gather": measure_gather(device, rounds, min(total, 24 * 8 * MIB)),
    }


def show(found: dict[str, Any]) -> None:
    """Print as text."""
    print(found["device"], f"medians of {found['rounds']} rounds (smallest to largest)")

    def text(values: dict[str, float]) -> str:
        return f"{values['median']:.3f} ({values['min']:.3f} to {values['max']:.3f})"

    print("pinned host-to-device copies: GB/s through the device, by bare driver calls, ratio")
    for row in found["copies"]:
        speeds = f"{row['device_gb_s']:7.2f} {row['driver_gb_s']:7.2f}"
        print(f"  {row['bytes'] / MIB:4.1f} MiB {speeds}  {text(row['speed_of_driver'])}")
    print("boundary move: ms of one copy of the bytes, of the move, of its planning; ratio")
    for row in found["boundary"]:
        counts = f"{row['rows']} rows, {row['pieces']} pieces, {row['launches']} launches"
        print(
            f"  {row['slots']} slots of {row['slot_bytes'] / MIB} MiB, {row['form']}: "
            f"{row['moved_bytes'] / GIB:.2f} GiB in {counts}: {text(row['one_copy_ms'])}, "
            f"{text(row['move_ms'])}, {text(row['planning_ms'])}; {text(row['move_over_copy'])}"
        )
        chunks = (f"{int(n) // KIB}: {ratio['median']:.3f}" for n, ratio in row["over_copy_by_chunk"].items())
        print("    ratio with KiB a block of threads: " + ", ".join(chunks))
    print("pinned blocks: bytes asked, counted, resident, unavailable to others; µs of one allocation")
    for row in found["pinned"]:
        sizes = [row[name] for name in ("bytes", "counted_bytes", "resident_bytes", "unavailable_bytes")]
        print("  " + ", ".join(f"{value:,.0f}" for value in sizes) + f"; {row['alloc_us']:.1f}")
    print("overlap of pinned fills and copies:", json.dumps(found["overlap"]))
    print("gather against copies: µs of copies, of the best gather, its chunk; ratio")
    for row in found["gather"]:
        best = row["gather_us"][str(row["best_chunk"])]
        print(
            f"  {row['experts']:2d} of {row['bytes'] / MIB:.1f} MiB: {text(row['copies_us'])}, {text(best)}, "
            f"{row['best_chunk'] // KIB} KiB; {text(row['gather_over_copies'])}"
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="auto", help="as open_device takes it")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--arena-gib", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--planning", action="store_true", help="time planning alone, without a GPU")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that everything runs")
    options = parser.parse_args()
    if options.planning:
        show_planning(options.rounds, int(options.arena_gib * GIB))
        return
    with open_device(options.device) as device:
        if not isinstance(device, GpuDevice):
            raise SystemExit(f"{device.name} is no GPU")
        arena, total = int(options.arena_gib * GIB) // MIB * MIB, 512 * MIB
        if options.quick:
            arena, total = 96 * MIB, 16 * MIB
        found = measure(device, rounds=2 if options.quick else options.rounds, arena=arena, total=total)
    if options.json:
        print(json.dumps(found))
    else:
        show(found)


if __name__ == "__main__":
    main()
