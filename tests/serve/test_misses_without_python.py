"""While Python cannot answer: one graph gets zeros that nobody else ever sees, later ones wait, or all are refused."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from engine_runs.tiered_runs import make_tiers
from expertier.engine_adapter.llama_cpp import LlamaModel
from expertier.engine_adapter.models.synth import TINY_SHAPE
from expertier.errors import DecodeError
from expertier.tiers.tier_set import TierSet
from limits.waits import Running, wait_until

TOKENS = [5, 300]


@pytest.fixture
def expected(engine, model):
    with (
        LlamaModel.open(engine, model, repack=False) as stock,
        stock.context(n_ctx=64, n_threads=1) as context,
    ):
        context.decode(TOKENS, 0)
        return context.logits()


@pytest.mark.parametrize("n_slots", [1, TINY_SHAPE.top_k, TINY_SHAPE.experts])
def test_one_zero_filled_graph_and_the_next_waits(engine, model, expected, n_slots):
    with (
        make_tiers(model, n_slots) as tiers,
        LlamaModel.open(engine, model, tiers=TierSet.of(tiers)) as loaded,
        loaded.context(n_ctx=64, n_threads=1) as context,
    ):
        loaded.binding.zero_fill_next_graph()
        context.decode([0, 0], 0)
        assert np.isfinite(context.logits()).all()
        assert tiers.stats().file.reads == 0
        assert not any(tiers._residency.residents(layer) for layer in range(tiers.table.n_layers))
        context.forget()

        lookups = loaded.binding.counters().lookups
        waiting = Running(context.decode, TOKENS, 0)
        wait_until(lambda: loaded.binding.counters().lookups > lookups, "no look-up")
        assert tiers.stats().file.reads == 0
        loaded.binding.serve_misses()
        waiting.outcome()
        assert context.logits().tobytes() == expected.tobytes()
        tiers.check_valid()


def test_refused_until_served_again(engine, model, expected):
    with (
        make_tiers(model, TINY_SHAPE.top_k) as tiers,
        LlamaModel.open(engine, model, tiers=TierSet.of(tiers)) as loaded,
        loaded.context(n_ctx=64, n_threads=1) as context,
    ):
        loaded.binding.refuse_misses()
        with pytest.raises(DecodeError, match="could not be read"):
            context.decode(TOKENS, 0)
        assert tiers.stats().file.reads == 0
        loaded.binding.serve_misses()
        context.forget()
        context.decode(TOKENS, 0)
        assert context.logits().tobytes() == expected.tobytes()
        tiers.check_valid()


def test_refusing_waits_for_the_fill_that_runs(engine, model):
    entered, may_go, order = threading.Event(), threading.Event(), []
    with (
        make_tiers(model, TINY_SHAPE.top_k) as tiers,
        LlamaModel.open(engine, model, tiers=TierSet.of(tiers)) as loaded,
        loaded.context(n_ctx=64, n_threads=1) as context,
    ):

        def hold(_error):
            entered.set()
            assert may_go.wait(20)
            order.append("filled")

        def refuse():
            loaded.binding.refuse_misses()
            order.append("refused")

        loaded.binding.on_fill = hold
        decoding = Running(context.decode, TOKENS, 0)
        assert entered.wait(20)
        refusing = Running(refuse)
        refusing.must_wait_in("refuse_misses")
        may_go.set()
        refusing.outcome()
        with pytest.raises(DecodeError):
            decoding.outcome()
        assert order == ["filled", "refused"]
        tiers.check_valid()
