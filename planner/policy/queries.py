"""What callers ask of a layer's tables: the policy's operations that change nothing in them.

Like those in `policy.py` they do not lock (the caller holds the layer's lock), allocate or raise.
"""

from __future__ import annotations

from expertier.planner.policy.outcome import Outcome
from expertier.planner.policy.tables import (
    ABORTS,
    EVICTIONS,
    FILLS,
    I32,
    PINNED,
    READY,
    SLOT_BITS,
    LayerView,
    compiled,
    in_range,
)

_BAD_EXPERT, _BAD_CALL = int(Outcome.BAD_EXPERT), int(Outcome.BAD_CALL)

# These masks change no number that has been checked; they tell the compiler that it is no negative index.
_SLOT_MASK = (1 << SLOT_BITS) - 1
_EXPERT_MASK = (1 << 31) - 1


@compiled
def victims(view: LayerView, slots: I32, n: int, experts: I32) -> int:
    """List up to `n` unpinned slots that `begin` would take next, in order, and the experts in them.

    `experts[i]` becomes the owner of `slots[i]`, or -1 where that is FREE. The tables do not change. Returns the
    number of slots listed.
    """
    if n < 0:
        return _BAD_CALL
    found = 0
    above = -PINNED
    while found < n:
        lowest = PINNED
        for slot in range(len(view.order)):
            order = view.order[slot]
            if order > above and view.pins[slot] == 0:
                lowest = min(lowest, order)
        if lowest == PINNED:
            break
        slots[found] = lowest & _SLOT_MASK
        experts[found] = view.owner[lowest & _SLOT_MASK]
        above = lowest
        found += 1
    return found


@compiled
def resident_first(view: LayerView, experts: I32, n: int) -> int:
    """Reorder `experts` in place, those in a slot (READY or FILLING) first, otherwise in their order.

    A call that is served in several groups begins with the resident experts, before it evicts any of them. Returns
    how many of `experts` are in a slot, or an `Outcome`.
    """
    if n < 0:
        return _BAD_CALL
    for i in range(n):
        if experts[i] < 0 or experts[i] >= len(view.slot_of):
            return _BAD_EXPERT
    n_resident = 0
    for i in range(n):
        expert = experts[i]
        if view.slot_of[expert] < 0:
            continue
        for j in range(i, n_resident, -1):
            experts[j] = experts[j - 1]
        experts[n_resident] = expert
        n_resident += 1
    return n_resident


@compiled
def is_fully_resident(view: LayerView) -> int:
    """Return 1 when every expert of the layer is READY in the slot of its own number, else 0.

    The answer stays 1 until a repack, as such a layer has no misses and so no evictions.
    """
    if len(view.owner) != len(view.slot_of):
        return 0
    for expert in range(len(view.owner)):
        if view.owner[expert] != expert or view.state[expert] & READY == 0:
            return 0
    return 1


@compiled
def version(view: LayerView) -> int:
    """Return a number that changes whenever an expert comes into a slot or leaves one."""
    changes = view.counters[EVICTIONS] + view.counters[FILLS] + view.counters[ABORTS]
    return int(changes & _EXPERT_MASK)


@compiled
def evicted_by(view: LayerView, slots: I32, n: int, experts: I32) -> int:
    """Set `experts[i]` to the expert that the owner of `slots[i]` evicted, or -1. Returns 0 or BAD_CALL."""
    if not in_range(slots, n, len(view.owner)):
        return _BAD_CALL
    for i in range(n):
        experts[i] = view.evicted_by[slots[i] & _SLOT_MASK]
    return 0
