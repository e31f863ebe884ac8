"""What all replay loops share: the calls of a trace as arrays, and the arrays that the loops count in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from expertier.planner.policy.tables import I32, I64, U8, compiled
from expertier.planner.replay.recency import MOST_EXPERTS, Recency, make_recency, serve, touch
from expertier.planner.traces.trace import Trace

LOOKUPS, MISSES, POOL_HITS, EVICTIONS = range(4)
N_COUNTS = 4

BLOCK_BYTES = 4096
"""The sizes of L2's blocks are multiples of this size."""


class Calls(NamedTuple):
    """A trace as compiled loops take it; the shapes are those of `Trace`."""

    layer: I32
    phase: U8
    bounds: I64
    experts: I32
    n_slots: I32
    """[L] how many slots each layer has in L1."""
    longest: int
    """The largest number of experts of any call."""


def make_calls(trace: Trace, experts: I32, n_slots: Sequence[int]) -> Calls:
    """Return the calls of a trace with its experts in the order of `experts`."""
    longest = int(trace.lengths.max(initial=1))
    return Calls(trace.layer, trace.phase, trace.bounds, experts, np.array(n_slots, np.int32), longest)


def make_counts(n_layers: int) -> I64:
    """Return zeros, [layers, 2 phases, 4]."""
    return np.zeros((n_layers, 2, N_COUNTS), np.int64)


def make_pool(trace: Trace, pool_bytes: int) -> Recency:
    """Return an empty L2 of `pool_bytes`; with 0 bytes it never holds anything."""
    sizes = trace.expert_bytes if trace.expert_bytes is not None else np.ones(trace.n_layers, np.int64)
    blocks = -(-sizes // BLOCK_BYTES) * BLOCK_BYTES
    return make_recency(blocks, int(trace.n_experts.max()), pool_bytes)


@compiled
def touch_evicted(pool: Recency, layer: int, expert: int) -> None:
    """Note that L1 evicted an expert: its copy in L2, if there is one, becomes the newest."""
    if expert >= 0:
        touch(pool, layer * int(pool.state[MOST_EXPERTS]) + int(expert))


@compiled
def fetch(pool: Recency, layer: int, expert: int) -> int:
    """Fetch an expert for L1, by way of L2; returns 1 where L2 had it."""
    return 1 if serve(pool, layer * int(pool.state[MOST_EXPERTS]) + int(expert)) else 0


@compiled
def fetch_together(pool: Recency, layer: int, experts: I32, missing: Any, n: int) -> int:
    """Fetch the experts that a group of a call misses, by way of L2; returns how many of them L2 had.

    They are `experts[i]` for the first `n` entries of `missing`, which this function reorders. As in
    `tiers/fill/filler.py`, experts that L2 has are served first, so that no read of a missing expert evicts one.
    """
    base = layer * int(pool.state[MOST_EXPERTS])
    n_read = 0
    for i in range(n):
        if not touch(pool, base + int(experts[missing[i]])):
            missing[n_read] = missing[i]
            n_read += 1
    for i in range(n_read):
        serve(pool, base + int(experts[missing[i]]))
    return n - n_read
