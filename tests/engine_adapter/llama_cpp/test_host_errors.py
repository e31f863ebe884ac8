"""What goes wrong around a batch: each failure is reported once, to whom it belongs, and nothing is left behind."""

from __future__ import annotations

import os
import shutil
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest

from engine_runs.tiered_runs import SMALL, assert_nothing_held, make_tiers, prompt_tokens, write_small_model
from expertier.engine_adapter.llama_cpp import LlamaModel
from expertier.engine_adapter.models.synth import write_model
from expertier.errors import BusyError, ConfigError, DecodeError, EngineError, SourceError
from expertier.tiers.tier_set import TierSet
from failures.failing_reads import FailingReads
from limits.waits import joined
from model_files.architecture_models import MODELS

OTHERS_WAIT_S = 60  # how long the engine waits for leases of others
PROMPT = prompt_tokens(60)
N_BEFORE = 20  # of them in a first batch
N_UBATCH = 16  # so that the second batch of 40 takes several


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_small_model(tmp_path_factory.mktemp("host_errors"), "Q4_K+Q6_K")


@pytest.fixture
def reads(monkeypatch):
    return FailingReads(monkeypatch)


@pytest.fixture
def open_tiered(loaded_engine, path):
    """Open (tiers, model, context) with a number of slots; at the end nothing may be held."""

    @contextmanager
    def open_tiered(n_slots=4, **options):
        with (
            make_tiers(path, n_slots) as tiers,
            LlamaModel.open(loaded_engine, path, tiers=TierSet.of(tiers)) as model,
        ):
            with model.context(**{"n_ctx": 128, "n_ubatch": N_UBATCH, "n_threads": 1} | options) as context:
                yield tiers, model, context
            assert_nothing_held(tiers)

    return open_tiered


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


# ---- failed batches


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
    """Its cache cannot go back: the sequence starts anew, and is never continued without what came before."""
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
    """As when the engine read an expert tensor back: it went on, with bytes that are not the expert's."""
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


# ---- whose error it is


def test_each_context_is_told_its_own_error(open_tiered, reads):
    """B fails, for want of room, between the failed read of A's thread and A's look at it."""
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
    """One thread's reads fail, the other's do not: one always fails, the other never does."""
    problems = []

    def run(context, fails):
        try:
            if fails:
                reads.fail_thread()
            for _ in range(15):
                if fails:
                    with pytest.raises(DecodeError, match="could not be read") as caught:
                        context.decode(PROMPT, 0)
                    assert isinstance(caught.value.__cause__, SourceError)
                else:
                    assert_stocks_logits(context, stock)
        except BaseException as problem:
            problems.append(problem)

    with (
        open_tiered(n_slots=2) as (_, model, a),
        model.context(n_ctx=128, n_ubatch=N_UBATCH, n_threads=1) as b,
    ):
        threads = [threading.Thread(target=run, args=case, daemon=True) for case in ((a, True), (b, False))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive()
        assert not problems


def test_a_thread_that_holds_a_lease_is_told_at_once(open_tiered, stock):
    with open_tiered() as (tiers, _, context):
        with tiers.acquire(0, range(4)):
            start = time.monotonic()
            with pytest.raises(BusyError, match="this thread holds leases"):
                context.decode(PROMPT[:N_BEFORE], 0)
            assert time.monotonic() - start < OTHERS_WAIT_S, "it waited for the lease"
        assert_stocks_logits(context, stock)


# ---- limits and arguments


@pytest.mark.parametrize("n_batch", [2048, 1 << 20])
def test_a_batch_is_no_longer_than_the_context(open_tiered, n_batch):
    with open_tiered(n_ctx=100, n_batch=n_batch) as (_, _, context):
        limit = context.n_batch
        assert limit == 100 <= context.n_ctx
        with pytest.raises(DecodeError, match=f"takes 1 to {limit} at once"):
            context.decode([1] * (limit + 1), 0)
        context.decode([1] * limit, 0)


def test_tokens_outside_the_vocabulary(open_tiered):
    with open_tiered() as (_, model, _):
        for token in (-1, model.n_vocab, -(2**31), 2**31 - 1):
            with pytest.raises(EngineError, match=f"no token {token}: the vocabulary has {model.n_vocab}"):
                model.piece(token)
            assert not model.is_end(token)
        assert all(isinstance(model.piece(token), bytes) for token in range(model.n_vocab))


def test_flash_attention_is_one_of_three_words(open_tiered):
    with open_tiered() as (_, model, _):
        for word in ("maybe", "", "ON"):
            with pytest.raises(ConfigError, match="auto, off, on"):
                model.context(n_ctx=64, flash_attention=word)
        for word in ("auto", "off", "on"):
            model.context(n_ctx=64, flash_attention=word).close()


def test_only_the_tiers_own_file_is_opened(loaded_engine, path, tmp_path):
    """Another model, or a copy even, would run with the experts of the tiers' file."""
    other = write_small_model(tmp_path, "F32")
    copy = shutil.copy(path, tmp_path / "copy.gguf")
    link = tmp_path / "link.gguf"
    link.symlink_to(path)
    for wrong in (other, copy, tmp_path / "missing.gguf", tmp_path):
        with make_tiers(path, 2) as tiers:
            with pytest.raises(EngineError) as caught:
                LlamaModel.open(loaded_engine, wrong, tiers=TierSet.of(tiers))
            assert str(wrong) in str(caught.value)
            assert not tiers._usage.bound
    with make_tiers(path, 2) as tiers:
        with pytest.raises(TypeError):
            LlamaModel.open(loaded_engine, None, tiers=TierSet.of(tiers))
        LlamaModel.open(loaded_engine, link, tiers=TierSet.of(tiers)).close()


def test_a_file_that_changed_since_the_tiers_were_made(loaded_engine, path, tmp_path):
    copy = tmp_path / "model.gguf"
    shutil.copy(path, copy)
    with make_tiers(copy, 2) as tiers:
        os.utime(copy, ns=(1, 1))
        with pytest.raises(EngineError, match="not the file that the tiers were made for, or it has changed"):
            LlamaModel.open(loaded_engine, copy, tiers=TierSet.of(tiers))


# ---- after the end


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
    """Either the model has a context then, and stays; or it is closed, and gets none."""
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
    """While a fill of the engine's runs, `close` fails, and the next works."""
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
    """Slots of a lease are not the engine's, from the first moment on."""
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
