"""Several sequences in one context, each in its own batches: as in stock; a failed batch costs its sequence alone."""

from __future__ import annotations

import numpy as np
import pytest

from engine_runs.tiered_runs import SMALL, assert_nothing_held, make_tiers, prompt_tokens
from expertier.engine_adapter.llama_cpp import LlamaContext, LlamaModel
from expertier.engine_adapter.models.synth import write_model
from expertier.errors import DecodeError, SourceError
from expertier.tiers.tier_set import TierSet
from model_files.architecture_models import MODELS

LENGTHS = (5, 17, 9)
STEPS = 6


def begin(context: LlamaContext) -> list[int]:
    """Run the prompts, each in its sequence; returns the next token of each."""
    following = []
    for sequence, length in enumerate(LENGTHS):
        context.forget(sequence)
        context.decode(prompt_tokens(40)[10 * sequence :][:length], 0, sequence=sequence)
        following.append(int(context.logits().argmax()))
    return following


def step(context: LlamaContext, following: list[int], n: int, order: list[int]) -> np.ndarray:
    """Run step `n` of all sequences, in this order; returns logits by sequence."""
    rows = {}
    for sequence in order:
        context.decode([following[sequence]], LENGTHS[sequence] + n, sequence=sequence)
        rows[sequence] = context.logits()
    return np.stack([rows[sequence] for sequence in range(len(LENGTHS))])


def run(context: LlamaContext) -> np.ndarray:
    """Return the logits of all steps: float32 of shape [steps, sequences, n_vocab]."""
    following, found = begin(context), []
    for n in range(STEPS):
        found.append(step(context, following, n, order=[2, 0, 1] if n % 2 else [0, 1, 2]))
        following = found[-1].argmax(axis=1).tolist()
    return np.stack(found)


def open_context(model: LlamaModel) -> LlamaContext:
    return model.context(n_ctx=384, n_threads=1, n_seq_max=3)


@pytest.fixture(scope="module")
def stock(loaded_engine, path):
    with LlamaModel.open(loaded_engine, path, repack=False) as model, open_context(model) as context:
        return run(context)


@pytest.mark.parametrize("n_slots", [1, SMALL.top_k, SMALL.experts])
def test_each_goes_on_as_in_stock(loaded_engine, path, stock, n_slots):
    with (
        make_tiers(path, n_slots) as tiers,
        LlamaModel.open(loaded_engine, path, tiers=TierSet.of(tiers)) as model,
        open_context(model) as context,
    ):
        assert run(context).tobytes() == stock.tobytes()
        assert not (stock[:, 0] == stock[:, 1]).all(), "the sequences differ"


@pytest.mark.parametrize("nth", [1, 2, 5])
def test_a_batch_that_fails_is_undone_in_its_sequence(loaded_engine, path, stock, reads, nth):
    with (
        make_tiers(path, SMALL.top_k) as tiers,
        LlamaModel.open(loaded_engine, path, tiers=TierSet.of(tiers)) as model,
        open_context(model) as context,
    ):
        following = begin(context)
        reads.fail_call(nth)
        with pytest.raises(DecodeError, match="1 tokens at position 5") as caught:
            step(context, following, 0, [0, 1, 2])
        assert isinstance(caught.value.__cause__, SourceError)
        assert_nothing_held(tiers)
        assert step(context, following, 0, [0, 1, 2]).tobytes() == stock[0].tobytes()


def test_a_sequence_that_was_lost_is_refused_until_it_begins_anew(loaded_engine, tmp_path, reads):
    """A recurrent model's cache keeps one state, so all of the sequence is lost; the other sequences go on."""
    written = write_model(tmp_path / "model.gguf", MODELS["qwen4exp"])
    with (
        make_tiers(written, MODELS["qwen4exp"].top_k) as tiers,
        LlamaModel.open(loaded_engine, written, tiers=TierSet.of(tiers)) as model,
        open_context(model) as context,
    ):
        following = begin(context)
        reads.fail_call(1)
        with pytest.raises(DecodeError, match="could not be read"):
            context.decode([following[0]], LENGTHS[0], sequence=0)
        with pytest.raises(DecodeError, match="start it anew, at position 0"):
            context.decode([following[0]], LENGTHS[0], sequence=0)
        for sequence in (1, 2):
            context.decode([following[sequence]], LENGTHS[sequence], sequence=sequence)
        assert begin(context) == following
