"""Moves of the boundary with half of the experts surviving: a move, its planning, and one copy of as many bytes."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from device_costs.rounds import ratios, spread, timed
from expertier.hip.gpu.device import GpuDevice
from expertier.hip.gpu.moves.plan import Scratch, plan_moves
from expertier.tiers.slots.moves import order_moves
from expertier.units import KIB, MIB

REPACK_CHUNKS = (16 * KIB, 32 * KIB, 64 * KIB, 128 * KIB)
SLOT_SIZES = (MIB, 3 * 512 * KIB, 4 * MIB)


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
