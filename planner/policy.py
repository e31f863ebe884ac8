"""The residency policy: look-up, admission and eviction as compiled functions over plain arrays.

One layer's slots are the entries `first[layer] .. first[layer] + n_slots[layer]` of the per-slot arrays. A
slot is in one of three states, and these calls are the arrows between them:

            begin (for a missing expert)               complete
    FREE ─────────────────────────────────► FILLING ─────────────► READY
      ▲                                       │  ▲                   │
      └─────────────── abort ─────────────────┘  └─ begin (evicts) ──┘

FREE is `owner == -1`, FILLING is `owner >= 0, ready == 0`, READY is `ready == 1`. `begin` pins every slot
that it returns; `release` and `abort` unpin. Pinned slots, and so FILLING ones, are never victims.

The functions are pure decisions: they do not lock (the caller holds the layer's lock), allocate, raise or
touch expert bytes. Each checks everything first and changes things last: an `Outcome` means that nothing was
changed. The same code serves Python (`residency.py`), C++ threads without the interpreter's lock
(`native.py`) and, with `NUMBA_DISABLE_JIT=1`, the interpreter.

Heat is an 8-bit counter: +16 a use, saturating, halved every 20 steps of its own layer (a decay of 0.966 a
step). It belongs to the expert and survives eviction. Measured on recorded gpt-oss-20b routing (24 layers,
top-4 of 32, 560 sequences of single-row decode, each from cold; hits in percent):

    slots a layer      heat of an expert    heat of a slot    LRU
    8 of 32                        68.85             67.12    65.02
    16 of 32                       90.65             90.35    88.86

Arguments that are arrays are described in `residency.py`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt
from numba import njit

from expertier.planner.outcome import Outcome

I32: TypeAlias = npt.NDArray[np.int32]
I64: TypeAlias = npt.NDArray[np.int64]
U8: TypeAlias = npt.NDArray[np.uint8]
_F = TypeVar("_F", bound=Callable[..., object])

# Columns of `counters`, one row a layer. They only grow.
CALLS, HITS, MISSES, EVICTIONS, FILLS, ABORTS = range(6)
N_COUNTERS = 6

# Entries of `settings`.
KIND = 0
N_SETTINGS = 1
KIND_LFU_DECAY, KIND_LRU = 0, 1

HEAT_PER_USE = 16
HEAT_LIMIT = 255
STEPS_PER_HALVING = 20

_BUSY = int(Outcome.BUSY)
_TOO_MANY = int(Outcome.TOO_MANY)
_BAD_EXPERT = int(Outcome.BAD_EXPERT)
_BAD_CALL = int(Outcome.BAD_CALL)


@cache
def source_stamp() -> int:
    """Return a number that changes with this file: compiled callers and directories carry it.

    Numba's on-disk cache of a caller in another file would not notice a change in this one.
    """
    return zlib.crc32(Path(__file__).read_bytes())


def _compiled(function: _F) -> _F:
    """Compile `function` at its first call, from the on-disk cache where that holds it."""
    return cast(_F, njit(cache=True)(function))


@_compiled
def _in_range(slots: I32, n: int, limit: int) -> bool:
    """Whether the first `n` of `slots` are slots of a layer that has `limit` of them."""
    if n < 0:
        return False
    for i in range(n):  # noqa: SIM110 (Numba compiles no generator inside all())
        if not 0 <= slots[i] < limit:
            return False
    return True


@_compiled
def _victim(
    layer: int, low: int, high: int, kind: int, owner: I32, pins: I32, heat: I32, last_use: I64
) -> int:
    """Return the unpinned slot of `low .. high` to take next, FREE ones first; -1 if all are pinned."""
    best = -1
    best_heat = 0
    for slot in range(low, high):
        if pins[slot] != 0:
            continue
        if owner[slot] < 0:
            return slot
        slot_heat = heat[layer, owner[slot]] if kind == KIND_LFU_DECAY else 0
        if best < 0 or slot_heat < best_heat or (slot_heat == best_heat and last_use[slot] < last_use[best]):
            best = slot
            best_heat = slot_heat
    return best


@_compiled
def _cool(layer: int, heat: I32) -> None:
    """Halve the heat of all experts of a layer."""
    for expert in range(heat.shape[1]):
        heat[layer, expert] >>= 1


@_compiled
def begin(
    layer: int,
    experts: I32,
    n: int,
    slots: I32,
    miss_index: I32,
    slot_of: I32,
    owner: I32,
    ready: U8,
    pins: I32,
    heat: I32,
    last_use: I64,
    evicted: I32,
    clock: I64,
    first: I32,
    n_slots: I32,
    n_experts: I32,
    counters: I64,
    settings: I64,
) -> int:
    """Look up `n` distinct experts of a layer, choose slots for the missing ones and pin all of them.

    Returns the number of misses or an `Outcome`. `slots[i]` becomes the slot of `experts[i]`, relative to the
    layer; `miss_index[j]` the index in `experts` of the j-th miss, in order. Misses are FILLING until
    `complete` or `abort`; `evicted` of their slots says which expert each one replaced. An expert named twice
    is served, too, and must be released as often.
    """
    if layer < 0 or layer >= first.shape[0] or n < 0:
        return _BAD_CALL
    if n > n_slots[layer]:
        return _TOO_MANY
    low = first[layer]
    high = low + n_slots[layer]

    n_missing = 0
    n_idle = 0  # unpinned slots that this call does not use itself
    filling = False
    for i in range(n):
        expert = experts[i]
        if expert < 0 or expert >= n_experts[layer]:
            return _BAD_EXPERT
        slot = slot_of[layer, expert]
        if slot < 0:
            n_missing += 1
        elif ready[low + slot] == 0:
            filling = True
        elif pins[low + slot] == 0:
            n_idle -= 1
    if filling:
        return _BUSY
    if n_missing > 0:
        for slot in range(low, high):
            if pins[slot] == 0:
                n_idle += 1
        if n_idle < n_missing:
            return _BUSY
    if n == 0:
        return 0

    clock[layer] += 1
    now = clock[layer]
    if now % STEPS_PER_HALVING == 0:
        _cool(layer, heat)
    for i in range(n):
        expert = experts[i]
        heat[layer, expert] = min(heat[layer, expert] + HEAT_PER_USE, HEAT_LIMIT)
        slot = slot_of[layer, expert]
        slots[i] = slot
        if slot >= 0:
            pins[low + slot] += 1
            last_use[low + slot] = now

    n_misses = 0
    for i in range(n):
        if slots[i] >= 0:
            continue
        expert = experts[i]
        slot = slot_of[layer, expert]
        if slot >= 0:  # named twice, and missing at its first mention
            pins[low + slot] += 1
            slots[i] = slot
            continue
        taken = _victim(layer, low, high, settings[KIND], owner, pins, heat, last_use)
        evicted[taken] = owner[taken]
        if owner[taken] >= 0:
            slot_of[layer, owner[taken]] = -1
            counters[layer, EVICTIONS] += 1
        owner[taken] = expert
        ready[taken] = 0
        pins[taken] = 1
        last_use[taken] = now
        slot_of[layer, expert] = taken - low
        slots[i] = taken - low
        miss_index[n_misses] = i
        n_misses += 1

    counters[layer, CALLS] += 1
    counters[layer, HITS] += n - n_misses
    counters[layer, MISSES] += n_misses
    return n_misses


@_compiled
def complete(
    layer: int, slots: I32, n: int, owner: I32, ready: U8, first: I32, n_slots: I32, counters: I64
) -> int:
    """Make READY those of `slots` that are FILLING; their bytes are in place. Pins stay. Returns how many."""
    if layer < 0 or layer >= first.shape[0] or not _in_range(slots, n, n_slots[layer]):
        return _BAD_CALL
    n_filled = 0
    for i in range(n):
        slot = first[layer] + slots[i]
        if owner[slot] >= 0 and ready[slot] == 0:
            ready[slot] = 1
            n_filled += 1
    counters[layer, FILLS] += n_filled
    return n_filled


@_compiled
def release(layer: int, slots: I32, n: int, pins: I32, first: I32, n_slots: I32) -> int:
    """Unpin `slots`, as `begin` returned them. Returns 0, or BAD_CALL when one of them is not pinned."""
    if layer < 0 or layer >= first.shape[0] or not _in_range(slots, n, n_slots[layer]):
        return _BAD_CALL
    low = first[layer]
    for i in range(n):
        pins[low + slots[i]] -= 1
    balanced = True
    for i in range(n):
        if pins[low + slots[i]] < 0:
            balanced = False
    if not balanced:
        for i in range(n):
            pins[low + slots[i]] += 1
        return _BAD_CALL
    return 0


@_compiled
def abort(
    layer: int,
    slots: I32,
    n: int,
    slot_of: I32,
    owner: I32,
    ready: U8,
    pins: I32,
    first: I32,
    n_slots: I32,
    counters: I64,
) -> int:
    """Undo `begin` after a failed fill: FILLING ones of `slots` become FREE, all are unpinned.

    What the misses evicted stays evicted: its bytes may have been overwritten. Returns 0 or BAD_CALL.
    """
    status = release(layer, slots, n, pins, first, n_slots)
    if status < 0:
        return status
    low = first[layer]
    for i in range(n):
        slot = low + slots[i]
        if owner[slot] >= 0 and ready[slot] == 0:
            slot_of[layer, owner[slot]] = -1
            owner[slot] = -1
    counters[layer, ABORTS] += 1
    return 0


@_compiled
def resident_first(layer: int, experts: I32, n: int, slot_of: I32, n_experts: I32) -> int:
    """Reorder `experts` in place, those in a slot (READY or FILLING) first, otherwise in their order.

    A call that needs several parts starts with what is there before it evicts any of it. Returns how many are
    in a slot, or an `Outcome`.
    """
    if layer < 0 or layer >= n_experts.shape[0] or n < 0:
        return _BAD_CALL
    for i in range(n):
        if experts[i] < 0 or experts[i] >= n_experts[layer]:
            return _BAD_EXPERT
    n_resident = 0
    for i in range(n):
        expert = experts[i]
        if slot_of[layer, expert] < 0:
            continue
        for j in range(i, n_resident, -1):
            experts[j] = experts[j - 1]
        experts[n_resident] = expert
        n_resident += 1
    return n_resident
