"""Plays a trace through a policy with given slots: what would have hit, and which bytes would have moved."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from expertier.errors import BudgetError, ConfigError
from expertier.planner.budget.allocate import plan_layers
from expertier.planner.budget.demand import LayerDemand
from expertier.planner.policy.kind import PolicyKind
from expertier.planner.policy.residency import Residency
from expertier.planner.replay.belady import Belady
from expertier.planner.replay.calls import (
    EVICTIONS,
    LOOKUPS,
    MISSES,
    POOL_HITS,
    Calls,
    make_calls,
    make_counts,
    make_pool,
)
from expertier.planner.replay.global_lru import play_global
from expertier.planner.replay.policy import play_calls
from expertier.planner.replay.recency import EVICTED, Recency, make_recency
from expertier.planner.replay.result import ReplayResult, gap_closed
from expertier.planner.traces.trace import Phase, Trace
from expertier.units import mib, mib_needed

I64 = npt.NDArray[np.int64]

BELADY = "belady"
GLOBAL_LRU = "lru-global"

POLICIES = (*(kind.value for kind in PolicyKind), GLOBAL_LRU, BELADY)
"""The names that a replay takes: the policies that ship, and two that only a replay has."""


@dataclass(frozen=True, slots=True)
class L1:
    """L1 of a replay: slots of each layer, and the same as one budget, which is what `lru-global` gets."""

    n_slots: tuple[int, ...]
    budget_bytes: int


def l1_of_slots(trace: Trace, n_slots: int) -> L1:
    """Return an L1 of `n_slots` slots a layer, in no layer more than it has experts. Raises `ConfigError` below 1."""
    if n_slots < 1:
        raise ConfigError(f"{n_slots} slots a layer were asked for; a layer needs 1 or more")
    slots = tuple(min(n_slots, n) for n in trace.n_experts.tolist())
    sizes = _sizes(trace).tolist()
    return L1(slots, sum(n * size for n, size in zip(slots, sizes, strict=True)))


def l1_of_budget(trace: Trace, budget_bytes: int) -> L1:
    """Return an L1 of equal numbers of slots, as many as the budget holds.

    Raises `BudgetError` below one slot a layer and `ConfigError` where the trace does not say how large experts are.
    """
    require_bytes(trace, "a budget")
    demands = [
        LayerDemand(layer=layer, n_experts=n, top_k=1, slot_bytes=size, fixed_bytes=0)
        for layer, (n, size) in enumerate(zip(trace.n_experts.tolist(), _sizes(trace).tolist(), strict=True))
    ]
    return L1(plan_layers(demands, budget_bytes=budget_bytes).slots, budget_bytes)


def require_bytes(trace: Trace, what: str) -> None:
    """Raise `ConfigError` where the trace has no bytes, which `what` needs."""
    if trace.expert_bytes is None:
        raise ConfigError(
            f"{what} in MiB needs the bytes of an expert, which this recording does not have; give --expert-bytes"
        )


def replay(
    trace: Trace, l1: L1, policy: str, *, pool_bytes: int = 0, each_from_cold: bool = False
) -> ReplayResult:
    """Play the trace through a policy of `POLICIES`, with an L2 of `pool_bytes` under L1.

    `each_from_cold` empties L1 and L2 before each sequence; otherwise one sequence follows another. The seconds are
    those of the compiled loop, without compilation and preparation.

    Raises `ConfigError` for a policy that is not known or a pool over a trace without bytes, and `BudgetError` where an
    expert is larger than all of L1 (`lru-global`).
    """
    if policy not in POLICIES:
        raise ConfigError(f"there is no policy {policy!r}: give one of {', '.join(POLICIES)}")
    if pool_bytes < 0:
        raise ConfigError(f"a pool of {pool_bytes} bytes was asked for; 0 is none")
    if pool_bytes:
        require_bytes(trace, "a pool")
    recorded_order = policy == GLOBAL_LRU
    calls = make_calls(trace, trace.experts if recorded_order else trace.ascending(), l1.n_slots)
    counts = make_counts(trace.n_layers)
    ranges = list(trace.ranges())
    if ranges and not each_from_cold:
        ranges = [(ranges[0][0], ranges[-1][1])]
    _run(
        trace, l1, policy, calls, make_pool(trace, pool_bytes), make_counts(trace.n_layers), 0, 0
    )  # compiles
    seconds, pool_evictions = 0.0, 0
    for first, last in ranges:
        pool = make_pool(trace, pool_bytes)
        seconds += _run(trace, l1, policy, calls, pool, counts, first, last)
        pool_evictions += int(pool.state[EVICTED])
    return _result(trace, policy, counts, pool_evictions, seconds)


def _run(
    trace: Trace, l1: L1, policy: str, calls: Calls, pool: Recency, counts: I64, first: int, last: int
) -> float:
    """Play some calls from empty tiers, add to `counts` and return the seconds in the loop."""
    most_experts = int(trace.n_experts.max())
    if policy == BELADY:
        belady = Belady(trace.n_layers, most_experts, calls.n_slots)
        start = time.perf_counter()
        belady.play(calls, pool, counts, first, last)
        return time.perf_counter() - start
    if policy == GLOBAL_LRU:
        largest = int(_sizes(trace).max())
        if largest > l1.budget_bytes:
            raise BudgetError(
                f"one expert takes {mib(largest)}, all of L1 is {mib(l1.budget_bytes)}: give at least "
                f"{mib_needed(largest)} MiB"
            )
        lru = make_recency(_sizes(trace), most_experts, l1.budget_bytes)
        start = time.perf_counter()
        play_global(lru, calls, pool, counts, first, last)
        return time.perf_counter() - start
    residency = Residency(trace.n_experts.tolist(), l1.n_slots, PolicyKind(policy))
    start = time.perf_counter()
    play_calls(residency, calls, pool, counts, first, last)
    seconds = time.perf_counter() - start
    counts[:, Phase.DECODE, EVICTIONS] += residency.by_layer(
        "evictions"
    )  # no result tells phases of evictions apart
    return seconds


def compare(
    trace: Trace,
    l1: L1,
    policies: Sequence[str],
    *,
    pool_bytes: int = 0,
    each_from_cold: bool = False,
) -> list[tuple[ReplayResult, float | None]]:
    """Return each policy's result and the share of the gap from LRU to the optimum that it closes.

    Raises what `replay` raises.
    """
    results: dict[str, ReplayResult] = {}
    for policy in (*policies, PolicyKind.LRU.value, BELADY):
        if policy not in results:
            results[policy] = replay(trace, l1, policy, pool_bytes=pool_bytes, each_from_cold=each_from_cold)
    lru, optimum = results[PolicyKind.LRU.value], results[BELADY]
    return [
        (results[policy], gap_closed(lru.misses, results[policy].misses, optimum.misses))
        for policy in policies
    ]


def _sizes(trace: Trace) -> I64:
    """Return the bytes of an expert of each layer, 1 where the trace does not say: a budget then counts experts."""
    return trace.expert_bytes if trace.expert_bytes is not None else np.ones(trace.n_layers, np.int64)


def _result(trace: Trace, policy: str, counts: I64, pool_evictions: int, seconds: float) -> ReplayResult:
    totals = counts.sum(axis=(0, 1))
    decode = counts[:, Phase.DECODE].sum(axis=0)
    by_layer = counts.sum(axis=1)
    bytes_in = from_pool = from_file = None
    if trace.expert_bytes is not None:
        bytes_in = int((by_layer[:, MISSES] * trace.expert_bytes).sum())
        from_pool = int((by_layer[:, POOL_HITS] * trace.expert_bytes).sum())
        from_file = bytes_in - from_pool
    return ReplayResult(
        policy=policy,
        lookups=int(totals[LOOKUPS]),
        misses=int(totals[MISSES]),
        decode_lookups=int(decode[LOOKUPS]),
        decode_misses=int(decode[MISSES]),
        evictions=int(totals[EVICTIONS]),
        pool_hits=int(totals[POOL_HITS]),
        pool_evictions=pool_evictions,
        bytes_in=bytes_in,
        bytes_l2_to_l1=from_pool,
        bytes_file_to_l2=from_file,
        seconds=seconds,
    )
