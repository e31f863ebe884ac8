"""Graphs that an engine may build around its experts: bit for bit what the CPU device makes of them, or an error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product

import pytest

from engine_runs.expert_graphs import THROWN, ExpertGraphs
from engine_runs.tiered_runs import SMALL, assert_nothing_held, make_tiers
from expertier.engine_adapter.binding.tier_binding import TierBinding
from expertier.errors import SourceError
from expertier.tiers.manager import TierManager
from failures.failing_reads import FailingReads

FAILED = -1  # GGML_STATUS_FAILED

SLOTS = (1, 2, SMALL.experts // 2, SMALL.experts)
TOKENS = (1, 3, 40)
SERVED = (
    "plain",
    "strided ids",
    "two layers",
    "no tokens left",
    "cut everywhere",
    "cut after gate",
    "cut after up",
    "cut after GLU",
    "input between",
    "input between, as a view",
    "input changed in place",
    "in place",
    "halves",
    "interleaved layers",
    "unselected branch",
    "uncomputed between",
    "interior output",
    "strided rows",
    "view of wider rows",
    "unrelated between",
    "biases",
    "input biases",
    "computed biases",
    "biases of other ids",
    "factors",
    "no gate",
)
REFUSED = ("view of experts", "GET_ROWS of experts", "MUL_MAT of experts")


@pytest.fixture(scope="module")
def graphs(loaded_engine, path):
    assert loaded_engine.proxy
    return ExpertGraphs(path)


@pytest.fixture
def bind(loaded_engine, path):
    """Bind tiers with a number of slots; at the end nothing may be held, and all must be valid."""

    @contextmanager
    def bind(n_slots: int) -> Iterator[tuple[TierManager, TierBinding]]:
        with make_tiers(path, n_slots) as tiers:
            binding = TierBinding(loaded_engine, tiers)
            try:
                yield tiers, binding
                assert_nothing_held(tiers)
            finally:
                binding.close()
            tiers.check_valid()

    return bind


def test_all_graphs_are_tried(graphs: ExpertGraphs):
    assert sorted((*SERVED, *REFUSED, "random")) == sorted(graphs.names)


@pytest.mark.parametrize("n_slots", SLOTS)
@pytest.mark.parametrize("graph", SERVED)
def test_served_graphs_are_bit_identical(graphs: ExpertGraphs, bind, graph, n_slots):
    with bind(n_slots) as (tiers, binding):
        for n_tokens, scheduled in product(TOKENS, (False, True)):
            result = graphs.on_proxy(binding, graph, n_tokens, scheduled=scheduled)
            case = f"{n_tokens} tokens, scheduled: {scheduled}"
            assert (result.status, result.message, result.cause) == (0, "", None), case
            assert result.outputs == graphs.on_cpu(graph, n_tokens), case
            assert_nothing_held(tiers)


@pytest.mark.parametrize("n_slots", SLOTS)
@pytest.mark.parametrize("seeds", [range(8), range(8, 16)], ids=str)
def test_random_graphs_are_bit_identical(graphs: ExpertGraphs, bind, seeds, n_slots):
    with bind(n_slots) as (tiers, binding):
        for seed, n_tokens, scheduled in product(seeds, TOKENS, (False, True)):
            result = graphs.on_proxy(binding, "random", n_tokens, scheduled=scheduled, seed=seed)
            case = f"seed {seed}, {n_tokens} tokens, scheduled: {scheduled}"
            assert (result.status, result.message, result.cause) == (0, "", None), case
            assert result.outputs == graphs.on_cpu("random", n_tokens, seed=seed), case
            assert_nothing_held(tiers)


@pytest.mark.parametrize("n_slots", [1, SMALL.experts // 2, SMALL.experts])
@pytest.mark.parametrize("graph", SERVED)
def test_a_failed_fill_restores_the_graph(graphs: ExpertGraphs, bind, monkeypatch, graph, n_slots):
    reads = FailingReads(monkeypatch)
    with bind(n_slots) as (_, binding):
        assert graphs.on_proxy(binding, graph, 3).status == 0
    n_reads = reads.calls
    for nth in sorted({1, n_reads // 2, n_reads}):
        with bind(n_slots) as (tiers, binding):
            reads.fail_call(nth)
            failed = graphs.on_proxy(binding, graph, 3)
            assert failed.status == FAILED, f"read {nth} of {n_reads}"  # and not NOT_RESTORED
            assert "could not be read" in failed.message
            assert isinstance(failed.cause, SourceError)
            assert_nothing_held(tiers)

            again = graphs.on_proxy(binding, graph, 3)
            assert (again.status, again.message) == (0, "")
            assert again.outputs == graphs.on_cpu(graph, 3)


@pytest.mark.parametrize("n_slots", [2, SMALL.experts])
@pytest.mark.parametrize("graph", REFUSED)
def test_other_uses_of_experts_end_in_an_error(graphs: ExpertGraphs, bind, graph, n_slots):
    with bind(n_slots) as (tiers, binding):
        for n_tokens in TOKENS:
            result = graphs.on_proxy(binding, graph, n_tokens)
            assert result.status == FAILED
            assert "blk.0.ffn_gate_exps.weight" in result.message
            assert_nothing_held(tiers)
        after = graphs.on_proxy(binding, "plain", 3)
        assert (after.status, after.message) == (0, "")
        assert after.outputs == graphs.on_cpu("plain", 3)


@pytest.mark.parametrize("graph", REFUSED)
def test_the_scheduler_gets_the_bytes_that_it_asks_for(graphs: ExpertGraphs, bind, graph):
    """It runs what the proxy refuses on another backend, with a copy of the experts: the file's bytes."""
    with bind(2) as (tiers, binding):
        for n_tokens in TOKENS:
            result = graphs.on_proxy(binding, graph, n_tokens, scheduled=True)
            assert (result.status, result.message) == (0, "")
            assert result.outputs == graphs.on_cpu(graph, n_tokens)
            assert_nothing_held(tiers)


def test_the_scheduler_s_graph_fails_where_the_bytes_cannot_be_read(
    graphs: ExpertGraphs, bind, monkeypatch: pytest.MonkeyPatch
):
    reads = FailingReads(monkeypatch)
    with bind(2) as (tiers, binding):
        reads.fail_call(1)
        result = graphs.on_proxy(binding, "MUL_MAT of experts", 3, scheduled=True)
        assert reads.failed == 1
        assert result.status == THROWN
        assert "the engine read expert tensor blk.0.ffn_gate_exps.weight" in result.message
        assert isinstance(result.cause, SourceError)
        assert_nothing_held(tiers)
        after = graphs.on_proxy(binding, "plain", 3)
        assert (after.status, after.message) == (0, "")
        assert after.outputs == graphs.on_cpu("plain", 3)
