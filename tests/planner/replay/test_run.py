"""Replays: as small models written anew, with counts that add up."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertier.errors import BudgetError, ConfigError
from expertier.planner.replay.run import (
    BELADY,
    GLOBAL_LRU,
    L1,
    POLICIES,
    l1_of_budget,
    l1_of_slots,
    replay,
)
from expertier.planner.traces.trace import Phase, Trace, trace_from_ids

N_LAYERS, N_EXPERTS = 3, 8
EXPERT_BYTES = 3 * 4096  # a multiple of L2's blocks

calls_of = st.lists(
    st.tuples(
        st.integers(0, N_LAYERS - 1),
        st.lists(st.integers(0, N_EXPERTS - 1), min_size=1, max_size=6, unique=True),
        st.sampled_from(Phase),
    ),
    min_size=1,
    max_size=60,
)
Call = tuple[int, list[int], Phase]


def make_trace(calls: list[Call]) -> Trace:
    """A trace of one sequence of these calls."""
    trace = Trace(
        layer=np.array([layer for layer, _, _ in calls], np.int32),
        step=np.arange(len(calls), dtype=np.int64),
        phase=np.array([phase for _, _, phase in calls], np.uint8),
        rows=np.ones(len(calls), np.int32),
        bounds=np.cumsum([0, *(len(experts) for _, experts, _ in calls)]).astype(np.int64),
        experts=np.array([e for _, experts, _ in calls for e in experts], np.int32),
        sequences=np.array([0, len(calls)], np.int64),
        n_experts=np.full(N_LAYERS, N_EXPERTS, np.int32),
        blocks=np.arange(N_LAYERS, dtype=np.int32),
        expert_bytes=np.full(N_LAYERS, EXPERT_BYTES, np.int64),
    )
    trace.check_valid()
    return trace


@pytest.mark.parametrize("policy", POLICIES)
@given(calls_of, st.integers(1, 8), st.integers(0, 30))
def test_counts_add_up(policy: str, calls: list[Call], n_slots: int, n_pool: int) -> None:
    trace = make_trace(calls)
    found = replay(trace, l1_of_slots(trace, n_slots), policy, pool_bytes=n_pool * EXPERT_BYTES)
    assert found.lookups == len(trace.experts)
    assert found.decode_lookups == sum(len(e) for _, e, phase in calls if phase is Phase.DECODE)
    assert found.hits + found.misses == found.lookups
    assert 0 <= found.decode_misses <= min(found.misses, found.decode_lookups)
    assert 0 <= found.misses - found.decode_misses <= found.lookups - found.decode_lookups
    distinct = len({(layer, e) for layer, experts, _ in calls for e in experts})
    assert found.misses >= distinct, "everything is missing once"
    assert 0 <= found.misses - found.evictions <= n_slots * N_LAYERS
    assert found.bytes_in == found.misses * EXPERT_BYTES
    assert found.bytes_l2_to_l1 is not None
    assert found.bytes_file_to_l2 is not None
    assert found.bytes_l2_to_l1 + found.bytes_file_to_l2 == found.bytes_in
    assert found.bytes_l2_to_l1 == found.pool_hits * EXPERT_BYTES
    from_file = found.misses - found.pool_hits
    assert from_file >= distinct
    if n_pool:
        assert 0 <= from_file - found.pool_evictions <= n_pool
    else:
        assert found.pool_evictions == 0


@given(calls_of, st.integers(1, 20), st.integers(0, 20))
def test_one_lru_over_all_layers(calls: list[Call], n_l1: int, n_pool: int) -> None:
    trace = make_trace(calls)
    l1 = L1((1,) * N_LAYERS, n_l1 * EXPERT_BYTES)
    found = replay(trace, l1, GLOBAL_LRU, pool_bytes=n_pool * EXPERT_BYTES)
    here: OrderedDict[tuple[int, int], None] = OrderedDict()
    pool: OrderedDict[tuple[int, int], None] = OrderedDict()
    misses = pool_hits = 0
    for layer, experts, _ in calls:
        for key in ((layer, expert) for expert in experts):
            if key in here:
                here.move_to_end(key)
                continue
            misses += 1
            if len(here) == n_l1:
                left, _ = here.popitem(last=False)
                if left in pool:
                    pool.move_to_end(left)
            here[key] = None
            if key in pool:
                pool_hits += 1
                pool.move_to_end(key)
            elif n_pool:
                if len(pool) == n_pool:
                    pool.popitem(last=False)
                pool[key] = None
    assert (found.misses, found.pool_hits) == (misses, pool_hits)


def test_experts_of_several_sizes_share_a_budget_in_bytes() -> None:
    trace = make_trace([(layer, [0], Phase.DECODE) for layer in (0, 1, 2, 0, 1)])
    object.__setattr__(trace, "expert_bytes", np.array([100, 200, 300], np.int64))
    # 300 fits only after both others left, 100 beside it, 200 again only without the 300.
    found = replay(trace, L1((1, 1, 1), 400), GLOBAL_LRU)
    assert (found.misses, found.evictions) == (5, 3)
    assert found.bytes_in == 100 + 200 + 300 + 100 + 200
    with pytest.raises(BudgetError, match=r"one expert takes .* give at least 1 MiB"):
        replay(trace, L1((1, 1, 1), 299), GLOBAL_LRU)


def test_a_sequence_from_cold_knows_nothing_of_the_one_before() -> None:
    steps = np.array([[[0, 1]], [[2, 3]], [[0, 1]], [[2, 3]]])
    trace = trace_from_ids(steps, np.array([0, 2, 4]))
    for policy in POLICIES:
        warm = replay(trace, l1_of_slots(trace, 4), policy)
        cold = replay(trace, l1_of_slots(trace, 4), policy, each_from_cold=True)
        assert (warm.misses, cold.misses) == (4, 8), policy


def test_a_trace_without_bytes_has_none_in_the_result() -> None:
    trace = trace_from_ids(np.array([[[0, 1]], [[2, 3]]]))
    found = replay(trace, l1_of_slots(trace, 2), BELADY)
    assert (found.bytes_in, found.bytes_l2_to_l1, found.bytes_file_to_l2) == (None, None, None)
    with pytest.raises(ConfigError, match="--expert-bytes"):
        l1_of_budget(trace, 1 << 20)
    with pytest.raises(ConfigError, match="--expert-bytes"):
        replay(trace, l1_of_slots(trace, 2), BELADY, pool_bytes=1 << 20)


def test_what_cannot_be_played_is_refused() -> None:
    trace = make_trace([(0, [0], Phase.DECODE)])
    with pytest.raises(ConfigError, match=r"no policy 'fifo'.*lfu-decay.*belady"):
        replay(trace, l1_of_slots(trace, 2), "fifo")
    with pytest.raises(ConfigError, match="0 slots a layer"):
        l1_of_slots(trace, 0)
    with pytest.raises(BudgetError, match="one slot in each of 3 layers"):
        l1_of_budget(trace, 3 * EXPERT_BYTES - 1)
    with pytest.raises(ConfigError, match="a pool of -1 bytes"):
        replay(trace, l1_of_slots(trace, 2), BELADY, pool_bytes=-1)
    assert l1_of_budget(trace, 7 * EXPERT_BYTES).n_slots == (3, 2, 2)
    assert l1_of_slots(trace, 100).n_slots == (N_EXPERTS,) * N_LAYERS
