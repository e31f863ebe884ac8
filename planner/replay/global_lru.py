"""One LRU over all layers with a budget in bytes, as some engines have it and as `bigmoe_route` was recorded with.

It takes the experts one by one as they were recorded, so a call may evict an expert of its own.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from expertier.compiled_functions import cached_njit
from expertier.planner.policy.tables import I64
from expertier.planner.replay.calls import EVICTIONS, LOOKUPS, MISSES, POOL_HITS, Calls, fetch, touch_evicted
from expertier.planner.replay.recency import (
    ABSENT,
    LIMIT,
    MOST_EXPERTS,
    Recency,
    evict_for,
    insert,
    replay_stamp,
    touch,
)


def play_global(cache_: Recency, calls: Calls, pool: Recency, counts: I64, first: int, last: int) -> None:
    """Play the calls `first` .. `last` and add to `counts`. No expert may be larger than the cache."""
    assert cache_.sizes.max() <= cache_.state[LIMIT], "an expert does not fit the cache"
    _loop(replay_stamp())(cache_, calls, pool, counts, first, last)


@cache
def _loop(stamp: int) -> Any:
    """Compile the loop. It is a closure over `stamp`, so `stamp` is part of its key in Numba's cache."""

    @cached_njit()
    def loop(lru: Recency, calls: Calls, pool: Recency, counts: I64, first: int, last: int) -> None:
        if stamp == 0:
            return
        most_experts = int(lru.state[MOST_EXPERTS])
        for call in range(first, last):
            layer, phase = int(calls.layer[call]), int(calls.phase[call])
            counts[layer, phase, LOOKUPS] += calls.bounds[call + 1] - calls.bounds[call]
            for i in range(calls.bounds[call], calls.bounds[call + 1]):
                key = layer * most_experts + int(calls.experts[i])
                if touch(lru, key):
                    continue
                counts[layer, phase, MISSES] += 1
                victim = evict_for(lru, lru.sizes[key])
                while victim != ABSENT:
                    counts[victim // most_experts, phase, EVICTIONS] += 1
                    if pool.state[LIMIT] > 0:
                        touch_evicted(pool, victim // most_experts, victim % most_experts)
                    victim = evict_for(lru, lru.sizes[key])
                insert(lru, key)
                if pool.state[LIMIT] > 0:
                    counts[layer, phase, POOL_HITS] += fetch(pool, layer, calls.experts[i])

    return loop
