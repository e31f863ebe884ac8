"""Closed contexts and models refuse every use, may be closed twice, and may be closed while other threads work."""

from __future__ import annotations

import threading

import pytest

from engine_runs.tiered_runs import SMALL, make_tiers
from expertier.engine_adapter.llama_cpp import LlamaModel
from expertier.errors import BusyError, EngineError
from expertier.tiers.tier_set import TierSet
from limits.waits import joined


def test_a_closed_context_is_not_used(open_tiered):
    with open_tiered() as (_, _, context):
        context.decode([1, 300], 0)
        context.close()
        for use in (
            lambda: context.n_ctx,
            lambda: context.n_batch,
            lambda: context.decode([1], 0),
            context.logits,
            context.sample,
            context.forget,
            context.set_sampler,
        ):
            with pytest.raises(EngineError, match="after it was closed"):
                use()
        context.close()


def test_a_closed_model_is_not_used(open_tiered):
    with open_tiered() as (_, model, context):
        context.close()
        model.close()
        for use in (
            lambda: model.handle,
            lambda: model.n_vocab,
            lambda: model.n_ctx_train,
            lambda: model.tokenize("a"),
            lambda: model.piece(1),
            lambda: model.is_end(1),
            model.load_counts,
            model.context,
            lambda: model.binding.bindings[0].device,
            lambda: model.binding.bindings[0].buffer_type,
            lambda: model.binding.counters(),
            lambda: model.binding.begin_load(),
        ):
            with pytest.raises(EngineError, match="after it was closed"):
                use()
        assert model.binding.take_error() == ("", None)
        model.binding.close()
        model.close()


def test_contexts_that_open_while_the_model_closes(loaded_engine, path):
    """Either the context is opened first and the model stays open, or the model is closed first and gets no context."""
    outcomes = set()
    for _ in range(40):
        model = LlamaModel.open(loaded_engine, path)
        start, opened, refused = threading.Barrier(2), [], []

        def open_one(model=model, start=start, opened=opened, refused=refused):
            start.wait(30)
            try:
                opened.append(model.context(n_ctx=64, n_threads=1))
            except EngineError as error:
                refused.append(error)

        thread = threading.Thread(target=open_one, daemon=True)
        thread.start()
        start.wait(30)
        try:
            model.close()
        except BusyError:
            outcomes.add("busy")
        joined(thread)
        assert len(opened) + len(refused) == 1
        if opened:
            opened[0].decode([1, 300], 0)
            assert 0 <= opened[0].sample() < SMALL.vocab
            opened[0].close()
        else:
            outcomes.add("closed")
        model.close()
    assert outcomes


def test_a_model_whose_tiers_are_busy_is_closed_again(loaded_engine, path):
    """`close` fails while a fill for the engine runs, and works afterwards."""
    with make_tiers(path, 4) as tiers:
        model = LlamaModel.open(loaded_engine, path, tiers=TierSet.of(tiers))
        with tiers._usage.engine_fill():
            for _ in range(2):
                with pytest.raises(BusyError):
                    model.close()
        model.close()
        model.close()
        assert not tiers._usage.bound


def test_a_model_is_closed_while_somebody_fills_a_lease(loaded_engine, path, reads):
    """Slots that a lease fills are never the engine's, so the model need not wait for them."""
    reading, go_on = threading.Event(), threading.Event()

    def hold_up():
        reading.set()
        assert go_on.wait(60)

    with make_tiers(path, 4) as tiers:
        model = LlamaModel.open(loaded_engine, path, tiers=TierSet.of(tiers))
        reads.before_each = hold_up
        thread = threading.Thread(target=lambda: tiers.acquire(0, [1, 2]).release(), daemon=True)
        thread.start()
        try:
            assert reading.wait(60)
            model.close()
        finally:
            go_on.set()
            joined(thread)
            reads.before_each = None
        assert not tiers._usage.bound
