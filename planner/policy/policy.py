"""The residency policy: look-up, admission and eviction as functions over one layer's tables (`tables.py`).

A slot is in one of three states, and these calls are the arrows between them:

            begin (for a missing expert)               complete
    FREE ─────────────────────────────────► FILLING ─────────────► READY
      ▲                                       │  ▲                   │
      └─────────────── abort ─────────────────┘  └─ begin (evicts) ──┘

`begin_prefetch` and `begin_prefetch_into` take the same two arrows as `begin`, for an expert that no call has
asked for yet. All three pin every slot that they return; `release` and `abort` unpin. Pinned slots, and so FILLING
ones, are never victims.

The functions only decide: they do not lock (the caller holds the layer's lock), allocate, raise or touch expert
bytes. Each checks everything first and changes tables last, so an `Outcome` means that nothing was changed. The same
code serves Python (`residency.py`), C++ threads without the interpreter's lock (`calls/native.py`) and, with
`NUMBA_DISABLE_JIT=1`, the interpreter. The files in `policies/` decide which expert leaves first: their `step` and
`use` are compiled into a `begin` of their own. `operations.py` lists the functions that callers get.
"""

from __future__ import annotations

import sys
from typing import Any, cast

import numpy as np

from expertier.planner.policy.outcome import Outcome
from expertier.planner.policy.rule import Rule
from expertier.planner.policy.tables import (
    ABORTS,
    CALLS,
    EVICTIONS,
    FILLS,
    HITS,
    I32,
    MISSES,
    PINNED,
    PINNED_BIT,
    PREFETCHES,
    RANK_FREE,
    RANK_SPECULATIVE,
    READY,
    SLOT_BITS,
    SPECULATIVE,
    USEFUL,
    WASTED,
    LayerView,
    compiled,
    in_range,
)

_BUSY, _TOO_MANY, _PRESENT = int(Outcome.BUSY), int(Outcome.TOO_MANY), int(Outcome.PRESENT)
_BAD_EXPERT, _BAD_CALL = int(Outcome.BAD_EXPERT), int(Outcome.BAD_CALL)

# These change no number that has been checked; they tell the compiler that it is no negative index.
_SLOT_MASK = (1 << SLOT_BITS) - 1
_EXPERT_MASK = (1 << 31) - 1


@compiled
def _idle(view: LayerView, experts: I32, n: int) -> int:
    """Return how many slots are unpinned, not counting the slots of `experts`."""
    found = 0
    for slot in range(len(view.pins)):
        found += view.pins[slot] == 0
    for i in range(n):
        slot = view.slot_of[experts[i] & _EXPERT_MASK]
        if slot >= 0:
            found -= view.pins[slot] == 0
    return found


@compiled
def _victim(view: LayerView) -> int:
    """Return the unpinned slot to take next, FREE ones first; -1 if all are pinned."""
    lowest = PINNED
    for slot in range(len(view.order)):
        # No branch: this becomes a minimum over vectors.
        lowest = min(lowest, view.order[slot] | (np.int64(view.pins[slot] != 0) << PINNED_BIT))
    return lowest & _SLOT_MASK if lowest < PINNED else -1


@compiled
def _place_for(view: LayerView, expert: int) -> int:
    """Return the unpinned slot for a missing expert; -1 if all are pinned.

    In a layer with a slot for each expert it is the slot of the expert's own number, if that is FREE. Once all experts
    are resident there, ids are slot numbers, and the experts lie in the order that kernels read fastest.
    """
    if len(view.owner) == len(view.slot_of) and view.owner[expert] < 0:
        return expert
    return _victim(view)


@compiled
def _occupy(view: LayerView, slot: int, expert: int, state: int) -> None:
    """Put `expert` into an unpinned slot, FILLING and pinned once; the slot's former expert is evicted."""
    former = view.owner[slot]
    view.evicted_by[slot] = former
    if former >= 0:
        view.slot_of[former] = -1
        view.counters[EVICTIONS] += 1
        if view.state[slot] & SPECULATIVE:
            view.counters[WASTED] += 1
    view.owner[slot] = expert
    view.state[slot] = state
    view.pins[slot] = 1
    view.slot_of[expert] = slot


def begin_for(policy: str) -> Any:
    """Compile `begin` with the `step` and `use` of the module named `policy`.

        begin(view, experts, n, slots, miss_index) -> int

    Looks up `n` distinct experts of a layer, chooses slots for the missing ones and pins all of them.
    Returns the number of misses or an `Outcome`. `slots[i]` becomes the slot of `experts[i]`, relative to the
    layer; `miss_index[j]` the index in `experts` of the j-th miss, in order. Misses are FILLING until
    `complete` or `abort`; `evicted_by` of their slots says which expert each one evicted. An expert named twice
    is served, too, and must be released as often.
    """
    rule = cast(Rule, sys.modules[policy])

    @compiled
    def begin(view: LayerView, experts: I32, n: int, slots: I32, miss_index: I32) -> int:
        if n < 0:
            return _BAD_CALL
        if n > len(view.owner):
            return _TOO_MANY

        n_missing = 0
        ready = READY
        for i in range(n):
            expert = experts[i]
            if expert < 0 or expert >= len(view.slot_of):
                return _BAD_EXPERT
            slot = view.slot_of[expert]
            if slot < 0:
                n_missing += 1
            else:
                ready &= view.state[slot]
        if ready == 0 or (n_missing > 0 and _idle(view, experts, n) < n_missing):
            return _BUSY
        if n == 0:
            return 0

        now = view.counters[CALLS] + 1
        view.counters[CALLS] = now
        rule.step(view, experts, n, n_missing, now)
        if n_missing == 0:
            for i in range(n):
                slot = view.slot_of[experts[i] & _EXPERT_MASK] & _SLOT_MASK
                slots[i] = slot
                view.pins[slot] += 1
                if view.state[slot] != READY:
                    view.state[slot] = READY
                    view.counters[USEFUL] += 1
            for i in range(n):
                slot = slots[i] & _SLOT_MASK
                view.order[slot] = (rule.use(view, experts[i] & _EXPERT_MASK, now) << SLOT_BITS) | slot
            view.counters[HITS] += n
            return 0

        for i in range(n):
            expert = experts[i] & _EXPERT_MASK
            slot = view.slot_of[expert]
            slots[i] = slot
            if slot >= 0:
                view.pins[slot] += 1
                view.order[slot] = (rule.use(view, expert, now) << SLOT_BITS) | slot
                if view.state[slot] != READY:
                    view.state[slot] = READY
                    view.counters[USEFUL] += 1
        n_misses = 0
        for i in range(n):
            if slots[i] >= 0:
                continue
            expert = experts[i] & _EXPERT_MASK
            slot = view.slot_of[expert]
            if slot >= 0:  # named twice, and missing at its first mention
                view.pins[slot] += 1
            else:
                slot = _place_for(view, expert)
                _occupy(view, slot, expert, 0)
                miss_index[n_misses] = i
                n_misses += 1
            view.order[slot] = (rule.use(view, expert, now) << SLOT_BITS) | slot
            slots[i] = slot
        view.counters[HITS] += n - n_misses
        view.counters[MISSES] += n_misses
        return n_misses

    return begin


@compiled
def begin_prefetch(view: LayerView, expert: int) -> int:
    """Choose a slot for an expert that no call has asked for; the slot is pinned and FILLING, as after `begin`.

    This counts as no use and adds no heat. Once unpinned, the expert leaves before any expert that was used.
    Returns the slot; PRESENT where the expert has one, READY or FILLING; BUSY where all are pinned; BAD_EXPERT.
    """
    if expert < 0 or expert >= len(view.slot_of):
        return _BAD_EXPERT
    if view.slot_of[expert] >= 0:
        return _PRESENT
    slot = _place_for(view, expert)
    if slot < 0:
        return _BUSY
    _occupy(view, slot, expert, SPECULATIVE)
    view.order[slot] = (RANK_SPECULATIVE << SLOT_BITS) | slot
    return slot


@compiled
def begin_prefetch_into(view: LayerView, expert: int, slot: int) -> int:
    """Do what `begin_prefetch` does, in a slot that the caller chose from those that `victims` listed.

    Returns the slot; PRESENT or BAD_EXPERT as `begin_prefetch`; BUSY where the slot is pinned; BAD_CALL where
    the layer has no such slot.
    """
    if slot < 0 or slot >= len(view.owner):
        return _BAD_CALL
    if expert < 0 or expert >= len(view.slot_of):
        return _BAD_EXPERT
    if view.slot_of[expert] >= 0:
        return _PRESENT
    if view.pins[slot] != 0:
        return _BUSY
    _occupy(view, slot, expert, SPECULATIVE)
    view.order[slot] = (RANK_SPECULATIVE << SLOT_BITS) | slot
    return slot


@compiled
def complete(view: LayerView, slots: I32, n: int) -> int:
    """Make the FILLING ones of `slots` READY, as their bytes are in place; return their number. Pins stay."""
    if not in_range(slots, n, len(view.owner)):
        return _BAD_CALL
    n_filled = 0
    for i in range(n):
        slot = slots[i]
        if view.owner[slot] >= 0 and view.state[slot] & READY == 0:
            view.counters[PREFETCHES] += view.state[slot] == SPECULATIVE
            view.state[slot] |= READY
            n_filled += 1
    view.counters[FILLS] += n_filled
    return n_filled


@compiled
def release(view: LayerView, slots: I32, n: int) -> int:
    """Unpin `slots`, as `begin` returned them. Returns 0, or BAD_CALL when one of them is not pinned."""
    if not in_range(slots, n, len(view.owner)):
        return _BAD_CALL
    balanced = True
    for i in range(n):
        slot = slots[i] & _SLOT_MASK
        view.pins[slot] -= 1
        balanced &= view.pins[slot] >= 0
    if balanced:
        return 0
    for i in range(n):
        view.pins[slots[i]] += 1
    return _BAD_CALL


@compiled
def abort(view: LayerView, slots: I32, n: int) -> int:
    """Undo `begin` after a failed fill: FILLING ones of `slots` become FREE, all are unpinned.

    Experts that the misses evicted stay evicted, as their bytes may have been overwritten. Returns 0 or BAD_CALL.
    """
    status = release(view, slots, n)
    if status < 0:
        return status
    for i in range(n):
        slot = slots[i]
        if view.owner[slot] >= 0 and view.state[slot] & READY == 0:
            view.slot_of[view.owner[slot]] = -1
            view.owner[slot] = -1
            view.state[slot] = 0
            view.order[slot] = (RANK_FREE << SLOT_BITS) | slot
    view.counters[ABORTS] += 1
    return 0


@compiled
def pin_ready(view: LayerView, experts: I32, n: int, slots: I32) -> int:
    """Pin the slots of those of `experts` that are READY, without counting a use; the caller releases them.

    `slots[i]` becomes the slot of `experts[i]`, or -1. Returns how many are pinned, or BAD_EXPERT.
    """
    if n < 0:
        return _BAD_CALL
    for i in range(n):
        if experts[i] < 0 or experts[i] >= len(view.slot_of):
            return _BAD_EXPERT
    n_held = 0
    for i in range(n):
        slot = view.slot_of[experts[i] & _EXPERT_MASK]
        if slot >= 0 and view.state[slot & _SLOT_MASK] & READY:
            view.pins[slot & _SLOT_MASK] += 1
            n_held += 1
            slots[i] = slot
        else:
            slots[i] = -1
    return n_held
