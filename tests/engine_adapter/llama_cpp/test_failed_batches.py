"""A batch that fails: its error reaches the context that it belongs to, once, and nothing of it is left behind."""

from __future__ import annotations

import threading
from functools import partial

import numpy as np
import pytest

from engine_runs.tiered_runs import SMALL, assert_nothing_held, make_tiers, prompt_tokens
from expertier.engine_adapter.llama_cpp import LlamaModel
from expertier.engine_adapter.models.synth import write_model
from expertier.errors import BusyError, DecodeError, EngineError, SourceError
from expertier.tiers.tier_set import TierSet
from limits.at_once import run_at_once
from limits.waits import joined
from model_files.architecture_models import MODELS

PROMPT = prompt_tokens(60)
N_BEFORE = 20  # of them in a first batch
N_UBATCH = 16  # so that the second batch of 40 takes several


def all_logits(context, tokens, position):
    """Decode one batch and return the logits of all its tokens."""
    context.decode(tokens, position, all_logits=True)
    return np.stack([context.logits(i) for i in range(len(tokens))])


@pytest.fixture(scope="module")
def stock(loaded_engine, path):
    """Stock logits of the prompt in two batches, and of one token after it."""
    with (
        LlamaModel.open(loaded_engine, path, repack=False) as model,
        model.context(n_ctx=128, n_ubatch=N_UBATCH, n_threads=1) as context,
    ):
        return [
            all_logits(context, PROMPT[:N_BEFORE], 0),
            all_logits(context, PROMPT[N_BEFORE:], N_BEFORE),
            all_logits(context, [300], len(PROMPT)),
        ]


def assert_stocks_logits(context, stock):
    """Run what `stock` ran, from an empty cache, and compare."""
    context.forget()
    for tokens, position, expected in (
        (PROMPT[:N_BEFORE], 0, stock[0]),
        (PROMPT[N_BEFORE:], N_BEFORE, stock[1]),
        ([300], len(PROMPT), stock[2]),
    ):
        assert all_logits(context, tokens, position).tobytes() == expected.tobytes()


def assert_no_result(context):
    for ask in (context.sample, context.logits, lambda: context.logits(0)):
        with pytest.raises(EngineError):
            ask()


def test_there_is_nothing_to_sample_before_a_batch(open_tiered):
    with open_tiered() as (_, _, context):
        assert_no_result(context)
        context.decode([1, 300], 0)
        assert 0 <= context.sample() < SMALL.vocab
        with pytest.raises(EngineError, match="no logits of token 0"):
            context.logits(0)  # kept for the last one only
        with pytest.raises(EngineError, match="no logits of token 7"):
            context.logits(7)


@pytest.mark.parametrize("part", [0.0, 0.3, 0.6, 1.0])
@pytest.mark.parametrize("n_slots", [1, 4, SMALL.experts])
def test_a_failed_batch_of_several_ubatches_can_be_repeated(open_tiered, reads, stock, n_slots, part):
    """The ubatches that ran before the failure are not in the cache, nor are their logits."""
    with open_tiered(n_slots) as (_, _, context):
        context.decode(PROMPT[:N_BEFORE], 0)
        before = reads.calls
        context.decode(PROMPT[N_BEFORE:], N_BEFORE)
        n_reads = reads.calls - before
    with open_tiered(n_slots) as (tiers, _, context):
        context.decode(PROMPT[:N_BEFORE], 0)
        reads.fail_call(1 + int(part * (n_reads - 1)))
        with pytest.raises(DecodeError, match="could not be read") as caught:
            context.decode(PROMPT[N_BEFORE:], N_BEFORE, all_logits=True)
        assert isinstance(caught.value.__cause__, SourceError)
        assert_nothing_held(tiers)
        assert_no_result(context)

        again = all_logits(context, PROMPT[N_BEFORE:], N_BEFORE)
        assert again.tobytes() == stock[1].tobytes()
        assert all_logits(context, [300], len(PROMPT)).tobytes() == stock[2].tobytes()


@pytest.mark.parametrize("architecture", ["qwen4exp", "nemotron_h_moe"])
def test_a_failed_batch_of_a_model_with_recurrent_layers(loaded_engine, reads, tmp_path, architecture):
    """Its cache cannot go back, so the sequence must start anew: it is never continued with its beginning missing."""
    path = write_model(tmp_path / "model.gguf", MODELS[architecture])
    options = {"n_ctx": 128, "n_ubatch": N_UBATCH, "n_threads": 1}
    with (
        LlamaModel.open(loaded_engine, path, repack=False) as model,
        model.context(**options) as context,
    ):
        expected = all_logits(context, PROMPT, 0)
    with (
        make_tiers(path, MODELS[architecture].top_k) as tiers,
        LlamaModel.open(loaded_engine, path, tiers=TierSet.of(tiers)) as model,
        model.context(**options) as context,
    ):
        for start_anew in (context.forget, lambda: None):
            context.decode(PROMPT[:N_BEFORE], 0)
            with pytest.raises(EngineError, match="recurrent layers"):
                context.forget(0, N_BEFORE // 2)
            with pytest.raises(DecodeError, match="invalid batch"):
                context.decode([SMALL.vocab], N_BEFORE)  # refused at once: the sequence is not lost
            context.decode(PROMPT[N_BEFORE:30], N_BEFORE)
            reads.fail_call(1)
            with pytest.raises(DecodeError, match="could not be read"):
                context.decode(PROMPT[30:], 30)
            for position in (30, 30 + N_UBATCH, len(PROMPT)):
                with pytest.raises(DecodeError, match="start it anew, at position 0"):
                    context.decode(PROMPT[30:], position)
                assert_no_result(context)
            start_anew()
            assert all_logits(context, PROMPT, 0).tobytes() == expected.tobytes()
            context.forget()
            assert_nothing_held(tiers)


def test_a_batch_that_the_engine_refuses_leaves_no_result(open_tiered, stock):
    with open_tiered() as (_, _, context):
        context.decode(PROMPT[:N_BEFORE], 0)
        for tokens, position, sequence in (
            ([SMALL.vocab], N_BEFORE, 0),
            ([-1], N_BEFORE, 0),
            ([300], N_BEFORE, 5),
            ([300], N_BEFORE, -1),
            ([300], N_BEFORE, -7),
            ([300], N_BEFORE, 300),
            ([300], 0, 0),
            ([300], N_BEFORE + 7, 0),
        ):
            with pytest.raises(DecodeError, match=r"status -1 .*invalid batch"):
                context.decode(tokens, position, sequence=sequence)
            assert_no_result(context)
        assert all_logits(context, PROMPT[N_BEFORE:], N_BEFORE).tobytes() == stock[1].tobytes()


def test_an_error_of_a_batch_that_ended_well_for_the_engine(open_tiered, stock, monkeypatch):
    """The engine went on after it read an expert tensor back, with bytes that are not the expert's."""
    with open_tiered() as (_, model, context):
        context.decode(PROMPT[:N_BEFORE], 0)
        with monkeypatch.context() as patch:
            patch.setattr(model.binding, "take_error", lambda: ("the engine read a tensor back", None))
            with pytest.raises(DecodeError, match="read a tensor back"):
                context.decode(PROMPT[N_BEFORE:], N_BEFORE)
        assert_no_result(context)
        assert all_logits(context, PROMPT[N_BEFORE:], N_BEFORE).tobytes() == stock[1].tobytes()


def test_only_sequences_that_there_are_can_be_forgotten(open_tiered, stock):
    with open_tiered() as (_, _, context):
        context.decode(PROMPT[:N_BEFORE], 0)
        for sequence in (1, 300, -1, -7, 2**31 - 1):
            with pytest.raises(EngineError, match=f"cannot forget sequence {sequence} "):
                context.forget(sequence)
        context.decode([300] * 7, N_BEFORE)
        context.forget(0, N_BEFORE)
        assert all_logits(context, PROMPT[N_BEFORE:], N_BEFORE).tobytes() == stock[1].tobytes()


def test_each_context_is_told_its_own_error(open_tiered, reads):
    """B fails for want of room after the read of A's thread has failed, before A has seen that error."""
    a_has_failed, b_is_done = threading.Event(), threading.Event()
    told = {}
    with (
        open_tiered() as (_, model, a),
        model.context(n_ctx=256, n_threads=1) as b,
    ):
        b.decode(PROMPT, 0)
        take_error = model.binding.take_error

        def take_error_late():
            if threading.current_thread() is thread and reads.failed:
                a_has_failed.set()
                assert b_is_done.wait(60)
            return take_error()

        def fail_by_reading():
            reads.fail_thread()
            with pytest.raises(DecodeError) as caught:
                a.decode(PROMPT, 0)
            told["a"] = caught.value

        thread = threading.Thread(target=fail_by_reading, daemon=True)
        model.binding.take_error = take_error_late
        thread.start()
        assert a_has_failed.wait(60)
        with pytest.raises(DecodeError) as caught:
            b.decode([300] * (b.n_ctx - len(PROMPT) + 1), len(PROMPT))
        told["b"] = caught.value
        b_is_done.set()
        joined(thread)
        assert isinstance(told["a"].__cause__, SourceError)
        assert "could not be read" in str(told["a"])
        assert told["b"].__cause__ is None
        assert "no room in the key-value cache" in str(told["b"])
        assert "read" not in str(told["b"])


def test_failures_on_two_threads_at_once(open_tiered, reads, stock):
    """The reads of one thread fail, those of the other do not: the first always fails, the second never does."""

    def fail(context):
        reads.fail_thread()
        for _ in range(15):
            with pytest.raises(DecodeError, match="could not be read") as caught:
                context.decode(PROMPT, 0)
            assert isinstance(caught.value.__cause__, SourceError)

    def work(context):
        for _ in range(15):
            assert_stocks_logits(context, stock)

    with (
        open_tiered(n_slots=2) as (_, model, a),
        model.context(n_ctx=128, n_ubatch=N_UBATCH, n_threads=1) as b,
    ):
        run_at_once([partial(fail, a), partial(work, b)])


def test_a_thread_that_holds_a_lease_is_told_at_once(open_tiered, stock):
    with open_tiered() as (tiers, _, context):
        with tiers.acquire(0, range(4)), pytest.raises(BusyError, match="this thread holds leases"):
            context.decode(PROMPT[:N_BEFORE], 0)
        assert_stocks_logits(context, stock)
