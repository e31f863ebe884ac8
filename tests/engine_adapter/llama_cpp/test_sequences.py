"""A token each of several sequences in one batch: as stock has them, refused whole, and undone whole where it fails."""

from __future__ import annotations

import numpy as np
import pytest

from engine_runs.tiered_runs import SMALL, assert_nothing_held, make_tiers, prompt_tokens, write_small_model
from expertier.engine_adapter.llama_cpp import LlamaContext, LlamaModel
from expertier.engine_adapter.models.synth import write_model
from expertier.errors import DecodeError, SourceError
from expertier.tiers.tier_set import TierSet
from failures.failing_reads import FailingReads
from model_files.architecture_models import MODELS

LENGTHS = (5, 17, 9)
STEPS = 6


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_small_model(tmp_path_factory.mktemp("sequences"), "Q4_K+Q6_K")


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
    tokens, positions = [following[i] for i in order], [LENGTHS[i] + n for i in order]
    context.decode_each(tokens, positions, order)
    rows = {sequence: context.logits(i) for i, sequence in enumerate(order)}
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


def test_rows_are_those_of_their_sequences(loaded_engine, path):
    """Of stock: a batch of one is rounded otherwise, and is nearer to its own row by far than to any other."""
    with LlamaModel.open(loaded_engine, path, repack=False) as model, open_context(model) as context:
        following = begin(context)
        together = step(context, following, 0, [1, 2, 0])
        begin(context)
        for sequence, length in enumerate(LENGTHS):
            context.decode([following[sequence]], length, sequence=sequence)
            apart = np.abs(context.logits() - together).mean(axis=1)
            assert apart[sequence] < 0.1 * np.delete(apart, sequence).min(), apart


@pytest.mark.parametrize("nth", [1, 2, 5])
def test_a_batch_that_fails_is_undone_in_every_sequence(loaded_engine, path, stock, monkeypatch, nth):
    reads = FailingReads(monkeypatch)
    with (
        make_tiers(path, SMALL.top_k) as tiers,
        LlamaModel.open(loaded_engine, path, tiers=TierSet.of(tiers)) as model,
        open_context(model) as context,
    ):
        following = begin(context)
        reads.fail_call(nth)
        with pytest.raises(DecodeError, match=r"a token each of sequences \[0, 1, 2\]") as caught:
            step(context, following, 0, [0, 1, 2])
        assert isinstance(caught.value.__cause__, SourceError)
        assert_nothing_held(tiers)
        assert step(context, following, 0, [0, 1, 2]).tobytes() == stock[0].tobytes()


def test_sequences_that_were_lost_are_refused_until_they_begin_anew(loaded_engine, tmp_path, monkeypatch):
    """A recurrent model's cache goes back to nothing: the other sequences of the batch are lost, too."""
    reads = FailingReads(monkeypatch)
    written = write_model(tmp_path / "model.gguf", MODELS["qwen4exp"])
    with (
        make_tiers(written, MODELS["qwen4exp"].top_k) as tiers,
        LlamaModel.open(loaded_engine, written, tiers=TierSet.of(tiers)) as model,
        open_context(model) as context,
    ):
        following = begin(context)
        reads.fail_call(1)
        with pytest.raises(DecodeError, match="could not be read"):
            context.decode_each(following[:2], LENGTHS[:2], [0, 1])
        for sequences in ([0], [1], [2, 1]):
            with pytest.raises(DecodeError, match="start it anew, at position 0"):
                context.decode_each(
                    [following[i] for i in sequences], [LENGTHS[i] for i in sequences], sequences
                )
        context.decode_each(following[2:], LENGTHS[2:], [2])
        assert begin(context) == following


def test_batches_that_make_no_sense_are_refused(loaded_engine, path):
    with LlamaModel.open(loaded_engine, path, repack=False) as model, open_context(model) as context:
        for tokens, positions, sequences in (
            ([1, 2], [0, 0], [0, 0]),
            ([1], [0, 0], [0, 1]),
            ([1, 2], [0], [0, 1]),
        ):
            with pytest.raises(DecodeError, match="no sequence twice"):
                context.decode_each(tokens, positions, sequences)
        with pytest.raises(DecodeError, match="takes 1 to"):
            context.decode_each([], [], [])
        with pytest.raises(DecodeError, match="an invalid batch"):
            context.decode_each([1, 1], [0, 0], [0, 3])
        context.decode_each([1, 1], [0, 0], [0, 1])
