"""Plays recorded calls through a policy as it ships, with L2 under it, by the functions that production runs.

The experts of a call are in ascending order, as the engine's plugin asks for them. A call with more experts than the
layer has slots is played in groups, resident experts first. Each group goes this way:

    begin ──► misses ──► copies of the evicted experts become L2's newest ──► misses that L2 has, then those that it
    lacks, are fetched ──► complete ──► release
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar, cast

import numpy as np
from numba import njit

from expertier.compiled_functions import cached_njit
from expertier.planner.policy.residency import Residency
from expertier.planner.policy.tables import (
    COMPILED,
    COMPLETE,
    EVICTED_BY,
    HEAD,
    I32,
    I64,
    N_SLOTS,
    RELEASE,
    RESIDENT_FIRST,
    ROW,
    array_at,
)
from expertier.planner.replay.calls import (
    LOOKUPS,
    MISSES,
    POOL_HITS,
    Calls,
    fetch_together,
    touch_evicted,
)
from expertier.planner.replay.recency import LIMIT, Recency, recency_at, replay_stamp

if COMPILED:
    from expertier.planner.policy.calls import c_calls as how
else:
    from expertier.planner.policy.calls import interpreted as how  # type: ignore[no-redef]


_F = TypeVar("_F", bound=Callable[..., object])

_NO_POOL = 0
"""Stands for the address of L2's directory where there is no L2."""


def separate(function: _F) -> _F:
    """Compile `function` separately from the compiled code that calls it."""
    return cast(_F, njit(function))


def play_calls(residency: Residency, calls: Calls, pool: Recency, counts: I64, first: int, last: int) -> None:
    """Play the calls `first` .. `last` and add to `counts`, except for L1's evictions, which `residency` counts."""
    buffers = np.empty((3, calls.longest), np.int32)
    pool_at = pool.directory.ctypes.data if pool.state[LIMIT] > 0 else _NO_POOL
    status = _loop(replay_stamp())(residency.directory_address, calls, pool_at, counts, first, last, buffers)
    assert status == 0, f"the tables refused a call of the trace: outcome {status}"


@separate
def _from_pool(
    directory: int, layer: int, experts_at: int, slots_at: int, missing_at: int, n: int, pool_at: int
) -> int:
    """Fetch the `n` missing experts by way of L2; returns how many of them L2 had.

    Each parameter whose name ends in `at` is an address: of the call's experts, of their slots, of the indices of the
    missing experts in both arrays, and of L2's directory.
    """
    row = array_at(directory + (HEAD + layer * ROW) * 8, ROW, np.int64)  # `layer_view` makes nine arrays
    n_slots = row[N_SLOTS]
    evicted_by = array_at(row[EVICTED_BY], n_slots, np.int32)
    experts, slots = array_at(experts_at, n_slots, np.int32), array_at(slots_at, n_slots, np.int32)
    missing = array_at(missing_at, n, np.int32)
    pool = recency_at(pool_at)
    for i in range(n):
        touch_evicted(pool, layer, evicted_by[slots[missing[i]]])
    return fetch_together(pool, layer, experts, missing, n)


@separate
def _in_groups(
    directory: int,
    layer: int,
    phase: int,
    experts: I32,
    n_slots: int,
    buffers: I32,
    pool_at: int,
    counts: I64,
) -> int:
    """Play a call that does not fit the layer's slots; returns below 0 where the policy refuses it."""
    slots, miss_index, ordered = buffers[0], buffers[1], buffers[2, : len(experts)]
    ordered[:] = experts
    status = how.on_slots(directory, RESIDENT_FIRST, layer, ordered)
    if status < 0:
        return status
    for begin in range(0, len(ordered), n_slots):
        group = ordered[begin : begin + n_slots]
        misses = how.begin(directory, layer, group, slots, miss_index)
        if misses < 0:
            return misses
        if misses > 0:
            counts[layer, phase, MISSES] += misses
            if pool_at != _NO_POOL:
                counts[layer, phase, POOL_HITS] += _from_pool(
                    directory,
                    layer,
                    group.ctypes.data,
                    slots.ctypes.data,
                    miss_index.ctypes.data,
                    misses,
                    pool_at,
                )
            how.on_slots(directory, COMPLETE, layer, slots[: len(group)])
        how.on_slots(directory, RELEASE, layer, slots[: len(group)])
    return 0


@cache
def _loop(stamp: int) -> Any:
    """Compile the loop. It is a closure over `stamp`, so `stamp` is part of its key in Numba's cache.

    Rare steps are in functions of their own, which get addresses: with more arrays in the loop, Numba would count
    references to these arrays in every round, which took twice the time of the policy.
    """

    @cached_njit()
    def loop(
        directory: int, calls: Calls, pool_at: int, counts: I64, first: int, last: int, buffers: I32
    ) -> int:
        if stamp == 0:
            return 0
        layers, phases, bounds, all_experts, n_slots = (
            calls.layer,
            calls.phase,
            calls.bounds,
            calls.experts,
            calls.n_slots,
        )
        slots, miss_index = buffers[0], buffers[1]
        for call in range(first, last):
            layer, phase = int(layers[call]), int(phases[call])  # the interpreter adds them to addresses
            begin, end = bounds[call], bounds[call + 1]
            counts[layer, phase, LOOKUPS] += end - begin
            if end - begin > n_slots[layer]:
                status = _in_groups(
                    directory,
                    layer,
                    phase,
                    all_experts[begin:end],
                    int(n_slots[layer]),
                    buffers,
                    pool_at,
                    counts,
                )
                if status < 0:
                    return status
                continue
            misses = how.begin(directory, layer, all_experts[begin:end], slots, miss_index)
            if misses < 0:
                return misses
            if misses > 0:
                counts[layer, phase, MISSES] += misses
                if pool_at != _NO_POOL:
                    counts[layer, phase, POOL_HITS] += _from_pool(
                        directory,
                        layer,
                        all_experts[begin:end].ctypes.data,
                        slots.ctypes.data,
                        miss_index.ctypes.data,
                        misses,
                        pool_at,
                    )
                how.on_slots(directory, COMPLETE, layer, slots[: end - begin])
            how.on_slots(directory, RELEASE, layer, slots[: end - begin])
        return 0

    return loop
