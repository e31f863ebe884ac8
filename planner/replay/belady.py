"""The offline optimum (Belady): the expert whose next use in the recording is farthest away leaves first.

A call needs all its experts at once, so it never evicts an expert of its own. No policy that obeys this rule misses
less with the same slots a layer. A call with more experts than the layer has slots runs in groups, whose order a policy
could choose. For such a call the optimum is a lower bound of the misses: experts in slots hit, and of all experts that
were in slots or are asked for, those whose next use is nearest stay.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from expertier.compiled_functions import cached_njit
from expertier.planner.policy.tables import I32, I64
from expertier.planner.replay.calls import (
    EVICTIONS,
    LOOKUPS,
    MISSES,
    POOL_HITS,
    Calls,
    fetch_together,
    touch_evicted,
)
from expertier.planner.replay.recency import LIMIT, Recency, replay_stamp

NEVER = np.iinfo(np.int64).max
"""The next use of an expert that is not used again."""


def next_uses(calls: Calls, n_layers: int, most_experts: int, first: int, last: int) -> I64:
    """Return, for each expert of each call in `first` .. `last`, the call among them that uses it next, or NEVER."""
    uses = np.empty(calls.bounds[last] - calls.bounds[first], np.int64)
    _loops(replay_stamp())[0](calls, np.full((n_layers, most_experts), NEVER, np.int64), uses, first, last)
    return uses


class Belady:
    """Slots, the experts in them, and the next use of each expert."""

    def __init__(self, n_layers: int, most_experts: int, n_slots: I32) -> None:
        """Start with empty slots."""
        total = int(n_slots.sum())
        self.slot_of = np.full((n_layers, most_experts), -1, np.int32)
        self.owner = np.full(total, -1, np.int32)
        self.next_use = np.full(total, NEVER, np.int64)
        self.called = np.full(total, -1, np.int64)
        self.first_slot = np.concatenate(([0], np.cumsum(n_slots))).astype(np.int64)

    def play(self, calls: Calls, pool: Recency, counts: I64, first: int, last: int) -> None:
        """Play the calls `first` .. `last` as if no call followed, and add to `counts`."""
        uses = next_uses(calls, *self.slot_of.shape, first, last)
        missing = np.empty(calls.longest, np.int64)
        arrays = (self.slot_of, self.owner, self.next_use, self.called, self.first_slot, missing)
        _loops(replay_stamp())[1](calls, uses, arrays, pool, counts, first, last)


@cache
def _loops(stamp: int) -> tuple[Any, Any]:
    """Compile both loops. Each is a closure over `stamp`, so `stamp` is part of its key in Numba's cache."""

    @cached_njit()
    def look_ahead(calls: Calls, ahead: I64, uses: I64, first: int, last: int) -> None:
        if stamp == 0:
            return
        origin = calls.bounds[first]
        for call in range(last - 1, first - 1, -1):
            layer = calls.layer[call]
            for i in range(calls.bounds[call], calls.bounds[call + 1]):
                expert = calls.experts[i]
                uses[i - origin] = ahead[layer, expert]
                ahead[layer, expert] = call

    @cached_njit()
    def loop(calls: Calls, uses: I64, arrays: Any, pool: Recency, counts: I64, first: int, last: int) -> None:
        if stamp == 0:
            return
        slot_of, owner, next_use, called, first_slot, missing = arrays
        origin = calls.bounds[first]
        for call in range(first, last):
            layer, phase = int(calls.layer[call]), int(calls.phase[call])
            begin, end = calls.bounds[call], calls.bounds[call + 1]
            low, high = first_slot[layer], first_slot[layer + 1]
            too_many = end - begin > high - low
            counts[layer, phase, LOOKUPS] += end - begin
            n_missing = 0
            for i in range(begin, end):
                slot = slot_of[layer, calls.experts[i]]
                if slot >= 0:
                    next_use[slot] = uses[i - origin]
                    called[slot] = -1 if too_many else call
                else:
                    missing[n_missing] = i
                    n_missing += 1
            counts[layer, phase, MISSES] += n_missing
            for i in missing[:n_missing]:
                expert = calls.experts[i]
                victim, latest = -1, np.int64(-1)
                for slot in range(low, high):
                    if owner[slot] < 0:
                        victim = slot
                        break
                    if called[slot] != call and next_use[slot] > latest:
                        victim, latest = slot, next_use[slot]
                former = owner[victim]
                if former >= 0:
                    counts[layer, phase, EVICTIONS] += 1
                    if too_many and uses[i - origin] >= next_use[victim]:
                        continue
                    slot_of[layer, former] = -1
                    if pool.state[LIMIT] > 0:
                        touch_evicted(pool, layer, former)
                slot_of[layer, expert] = victim
                owner[victim] = expert
                next_use[victim] = uses[i - origin]
                called[victim] = -1 if too_many else call
            if pool.state[LIMIT] > 0:
                counts[layer, phase, POOL_HITS] += fetch_together(
                    pool, layer, calls.experts, missing, n_missing
                )
                if too_many:
                    for i in range(begin, end):
                        if slot_of[layer, calls.experts[i]] < 0:
                            touch_evicted(pool, layer, calls.experts[i])

    return look_ahead, loop
