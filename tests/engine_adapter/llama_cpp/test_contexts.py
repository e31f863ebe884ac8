"""Several contexts and models in one process do not disturb each other."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from engine_runs.tiered_runs import SMALL, make_tiers, prompt_tokens, run_model, write_small_model
from expertier.engine_adapter.llama_cpp import LlamaModel
from expertier.engine_adapter.llama_cpp.generation import generate
from expertier.errors import BusyError, DecodeError, EngineError
from expertier.tiers.tier_set import TierSet
from limits.at_once import run_at_once


@pytest.fixture(scope="module")
def expected(loaded_engine, path):
    """Stock logits of a prompt of 60 tokens and 24 more, and of its reverse, one thread."""
    first, second = prompt_tokens(60), prompt_tokens(60)[::-1]
    return [
        (prompt, run_model(loaded_engine, path, None, prompt=prompt, n_tokens=24).logits)
        for prompt in (first, second)
    ]


@pytest.mark.parametrize("n_slots", [1, 3, SMALL.experts // 2, SMALL.experts])
def test_interleaved_contexts(loaded_engine, path, expected, n_slots):
    with (
        make_tiers(path, n_slots) as tiers,
        LlamaModel.open(loaded_engine, path, tiers=TierSet.of(tiers)) as model,
        model.context(n_ctx=128, n_threads=1) as one,
        model.context(n_ctx=128, n_threads=1) as two,
    ):
        contexts = [one, two]
        logits = [[], []]
        for i, context in enumerate(contexts):
            context.decode(expected[i][0], 0, all_logits=True)
            logits[i] += [context.logits(j) for j in range(60)]
        for position in range(60, 84):
            for i, context in enumerate(contexts):
                context.decode([context.sample()], position)
                logits[i].append(context.logits())
        for found, (_, stock) in zip(logits, expected, strict=True):
            assert np.stack(found).tobytes() == stock.tobytes()
        tiers.check_valid()


@pytest.mark.parametrize("n_slots", [1, 3, SMALL.top_k, SMALL.experts // 2])
def test_contexts_on_threads(loaded_engine, path, expected, n_slots):
    """Two threads decode at once over few slots: each waits for the other's slots; no deadlock, no wrong bytes."""
    with (
        make_tiers(path, n_slots, host_pool_bytes=1 << 20) as tiers,
        LlamaModel.open(loaded_engine, path, tiers=TierSet.of(tiers)) as model,
    ):

        def work(i):
            prompt, stock = expected[i]
            with model.context(n_ctx=128, n_threads=1) as context:
                for _ in range(2):
                    context.forget()
                    done = generate(context, prompt, 24, keep_logits=True)
                    assert np.stack(done.logits).tobytes() == stock.tobytes()

        run_at_once([partial(work, i) for i in range(2)])
        tiers.check_valid()


def test_two_models_and_stock_in_one_process(loaded_engine, path, expected, tmp_path):
    other = write_small_model(tmp_path, "Q8_0")
    stock_other = run_model(loaded_engine, other, None, prompt=expected[0][0], n_tokens=4)
    with (
        make_tiers(path, 3) as tiers,
        make_tiers(other, 5) as other_tiers,
        LlamaModel.open(loaded_engine, path, tiers=TierSet.of(tiers)) as model,
        LlamaModel.open(loaded_engine, other, tiers=TierSet.of(other_tiers)) as other_model,
        LlamaModel.open(loaded_engine, path, repack=False) as stock_model,
    ):
        for opened, logits in (
            (model, expected[0][1]),
            (other_model, stock_other.logits),
            (stock_model, expected[0][1]),
        ):
            with opened.context(n_ctx=128, n_threads=1) as context:
                done = generate(context, expected[0][0], 4, keep_logits=True)
                found = np.stack(done.logits)
                assert found.tobytes() == logits[: len(found)].tobytes()
        assert tiers.stats().l1.hits > 0
        assert other_tiers.stats().l1.hits > 0


def test_what_is_in_use_does_not_close(loaded_engine, path):
    tiers = make_tiers(path, 3)
    model = LlamaModel.open(loaded_engine, path, tiers=TierSet.of(tiers))
    context = model.context(n_ctx=64, n_threads=1)
    with pytest.raises(BusyError, match="1 open context"):
        model.close()
    with pytest.raises(BusyError):
        tiers.close()
    with pytest.raises(BusyError):
        LlamaModel.open(loaded_engine, path, tiers=TierSet.of(tiers))  # one engine model a manager
    context.close()
    context.close()
    model.close()
    model.close()
    tiers.close()


def test_batches_outside_the_limits_are_refused(loaded_engine, path):
    with (
        LlamaModel.open(loaded_engine, path) as model,
        model.context(n_ctx=64, n_batch=32, n_threads=1) as context,
    ):
        for tokens in ([], [1] * 33):
            with pytest.raises(DecodeError, match="takes 1 to 32"):
                context.decode(tokens, 0)
        for position in range(0, context.n_ctx, 32):
            context.decode([1] * 32, position)
        with pytest.raises(DecodeError, match="no room in the key-value cache"):
            context.decode([1], context.n_ctx)


def test_a_model_that_the_engine_refuses(loaded_engine, path, tmp_path):
    """Its experts are fine, but the engine refuses it: the error is the engine's, and the tiers are free again."""
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(path.read_bytes().replace(b"output_norm.weight", b"output_morn.weight"))
    with make_tiers(broken, 2) as tiers:
        with pytest.raises(EngineError, match="output_norm"):
            LlamaModel.open(loaded_engine, broken, tiers=TierSet.of(tiers))
        assert not tiers._usage.bound
