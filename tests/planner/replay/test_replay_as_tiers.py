"""A replay counts what the tiers count over the same calls, with L2 under L1."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from expertier.hip import open_device
from expertier.planner import PolicyKind
from expertier.planner.replay.run import L1, replay
from expertier.planner.traces.trace import Phase, Trace
from expertier.testing import LayerShape, PatternSource, synthetic_table
from expertier.tiers.config.config import TierConfig
from expertier.tiers.host_pool import pool as host_pool
from expertier.tiers.host_pool.budget import HostBudget
from expertier.tiers.manager import TierManager
from expertier.tiers.model.table import ExpertTable

Call = tuple[int, tuple[int, ...]]

BLOCK_BYTES = 4096

IS_DEEP = settings().max_examples > 1000
N_EXAMPLES = settings().max_examples if IS_DEEP else 150
"""A tenth of these see the reads of a call push out its copies; the quick ones are the same in every run."""


def table_of(*layers: tuple[int, int]) -> ExpertTable:
    """A model of (experts, rows of a matrix) a layer; an expert has three matrices of 32 floats a row."""
    return synthetic_table([LayerShape(n_experts, 32, rows, ("F32",) * 3) for n_experts, rows in layers])


# All experts of a model have blocks of one size: where these differ, a replay evicts whatever is oldest.
ALIKE = table_of((8, 32), (8, 32))
TABLES = (ALIKE, table_of((8, 32)), table_of((8, 32), (4, 31), (6, 32)), table_of((8, 5), (5, 3)))


@dataclass(frozen=True)
class Case:
    """What both sides play."""

    table: ExpertTable
    n_slots: int
    pool_bytes: int
    policy: PolicyKind
    calls: tuple[Call, ...]


def alike(n_slots: int, n_pool: int, *calls: Call, policy: PolicyKind = PolicyKind.LRU) -> Case:
    """A case of two layers of eight experts, with an L2 of `n_pool` of them."""
    return Case(ALIKE, n_slots, n_pool * ALIKE.layers[0].expert_bytes, policy, calls)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Cases where L2 is short: it holds less than what was used, and a call misses several at once."""
    table = draw(st.sampled_from(TABLES))
    sizes = [layer.n_experts for layer in table.layers]
    block = -(-table.layers[0].expert_bytes // BLOCK_BYTES) * BLOCK_BYTES
    n_pool = draw(st.integers(0, sum(sizes)))
    beside = draw(st.sampled_from((0, 0, 1, block - 1)))
    # Bits say which experts: up to two, any, or all of them, as the rows of a prompt use.
    calls_of_layer = [
        st.tuples(
            st.just(layer),
            st.one_of(
                st.integers(1, 2**n - 1),
                st.integers(1, 2**n - 1),
                st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)).map(
                    lambda pair: 1 << pair[0] | 1 << pair[1]
                ),
                st.just(2**n - 1),
            ).map(lambda bits: tuple(expert for expert in range(bits.bit_length()) if bits >> expert & 1)),
        )
        for layer, n in enumerate(sizes)
    ]
    return Case(
        table,
        draw(st.integers(1, max(sizes))),
        n_pool * block + beside,
        draw(st.sampled_from(PolicyKind)),
        tuple(draw(st.lists(st.one_of(calls_of_layer), min_size=4, max_size=25))),
    )


def trace_of(case: Case) -> Trace:
    """The calls as a recording of one sequence."""
    calls, layers = case.calls, case.table.layers
    trace = Trace(
        layer=np.array([layer for layer, _ in calls], np.int32),
        step=np.arange(len(calls), dtype=np.int64),
        phase=np.full(len(calls), Phase.DECODE, np.uint8),
        rows=np.ones(len(calls), np.int32),
        bounds=np.cumsum([0, *(len(experts) for _, experts in calls)]).astype(np.int64),
        experts=np.array([expert for _, experts in calls for expert in experts], np.int32),
        sequences=np.array([0, len(calls)], np.int64),
        n_experts=np.array([layer.n_experts for layer in layers], np.int32),
        blocks=np.arange(len(layers), dtype=np.int32),
        expert_bytes=np.array([layer.expert_bytes for layer in layers], np.int64),
    )
    trace.check_valid()
    return trace


def counts_of_tiers(case: Case) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Slots of the tiers, and what they count."""
    demands = case.table.layer_demands()
    config = TierConfig(
        expert_cache_bytes=sum(demand.bytes_for(min(case.n_slots, demand.n_experts)) for demand in demands),
        host_pool_bytes=case.pool_bytes,
        policy=case.policy,
        fill_threads=0,  # several fills at once reach L2 in an order that is a race
    )
    with TierManager(case.table, device=open_device("host"), config=config, source=PatternSource()) as tiers:
        for layer, experts in case.calls:
            with tiers.acquire(layer, np.array(experts, np.int32)) as lease:
                assert sum(len(group.experts) for group in lease.groups) == len(experts)
        stats = tiers.stats()
        l1, l2 = stats.l1, stats.l2
        counts = (l1.hits, l1.misses, l1.evictions, l1.bytes_in, stats.file.bytes_read, l2.hits, l2.evictions)
        return tiers.slots, counts


@pytest.fixture(autouse=True)
def _alone(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what the tiers say of budgets as small as these, and that L2 shrinks where the machine runs short."""
    caplog.set_level("ERROR", "expertier")
    monkeypatch.setattr(host_pool, "process_budget", HostBudget)


# What runs have found, first the reads of a call pushing out the copies that it needs; then the other rules, one each:
# what L1 evicts becomes L2's newest, groups begin with what is there, and L2 has whole blocks only.
@example(alike(2, 11, (0, (0,)), (0, (0, 1, 2, 3, 4, 5)), (1, (0, 1, 2, 3, 4, 5)), (0, (0, 1))))
@example(alike(2, 2, (0, (0,)), (0, (1,)), (0, (2,)), (0, (0,))))
@example(alike(1, 0, (0, (1,)), (0, (0, 1))))
@example(Case(TABLES[3], 1, BLOCK_BYTES - 1, PolicyKind.LRU, ((0, (0,)), (0, (1,)), (0, (0,)))))
@given(cases())
@settings(max_examples=N_EXAMPLES, derandomize=not IS_DEEP)
def test_a_replay_is_the_tiers_over_the_same_calls(case: Case) -> None:
    slots, counts = counts_of_tiers(case)
    found = replay(trace_of(case), L1(slots, 0), case.policy, pool_bytes=case.pool_bytes)
    assert found.bytes_file_to_l2 is not None
    replayed = (found.hits, found.misses, found.evictions, found.bytes_in, found.bytes_file_to_l2)
    assert (*replayed, found.pool_hits, found.pool_evictions) == counts
