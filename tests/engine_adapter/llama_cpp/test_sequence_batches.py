"""Several sequences in one batch, as servers make them: as in stock bit for bit, and as each sequence by itself."""

from __future__ import annotations

import ctypes as ct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import engine_runs
from engine_runs.native_build import build_library
from engine_runs.tiered_runs import SMALL, assert_nothing_held, make_tiers, prompt_tokens, write_small_model
from expertier.engine_adapter.llama_cpp import LlamaModel, LoadedEngine
from expertier.tiers.tier_set import TierSet

SOURCE = Path(engine_runs.__file__).with_name("sequence_batches_calls.cpp")
LENGTHS = (5, 17, 9)
"""Of the prompts, each the beginning of a sequence; `STEPS` tokens follow one by one."""
STEPS = 6
TOKENS = [prompt_tokens(60)[10 * i :][: length + STEPS] for i, length in enumerate(LENGTHS)]
ROUNDING = 0.05
"""The CPU's kernels round differently for one row and for several: by 0.003 at most where logits are up to 10."""

Logits = npt.NDArray[np.float32]
Row = tuple[int, int, int]
"""A token, its position and its sequence."""
Decode = Callable[[Sequence[Row]], Logits]


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of F32 matrices: quantised ones would make another routing of a small difference."""
    return write_small_model(tmp_path_factory.mktemp("sequence_batches"), "F32")


@pytest.fixture(scope="module")
def library(loaded_engine: LoadedEngine) -> ct.CDLL:
    """The calls of llama.h that the host library does not make; the engine's symbols must be there first."""
    assert loaded_engine.proxy
    loaded = ct.CDLL(str(build_library("sequence_batches", [SOURCE])))
    loaded.sequence_batches_open.restype = ct.c_void_p
    loaded.sequence_batches_open.argtypes = [ct.c_void_p, ct.c_int32]
    loaded.sequence_batches_close.argtypes = [ct.c_void_p]
    loaded.sequence_batches_decode.argtypes = [
        ct.c_void_p, ct.c_int32, ct.c_void_p, ct.c_void_p, ct.c_void_p, ct.c_int32, ct.c_void_p,
    ]  # fmt: skip
    return loaded


@contextmanager
def decoding(library: ct.CDLL, engine: LoadedEngine, model: LlamaModel) -> Iterator[Decode]:
    """Decode batches in a context of the model, which is freed at the end; each row gets its logits."""
    handle = model.hand_over()
    context = library.sequence_batches_open(handle, len(TOKENS))
    assert context

    def decode(rows: Sequence[Row]) -> Logits:
        tokens, positions, sequences = np.array(rows, np.int32).T.copy()
        found = np.empty((len(rows), SMALL.vocab), np.float32)
        given = (tokens.ctypes.data, positions.ctypes.data, sequences.ctypes.data)
        assert (
            library.sequence_batches_decode(context, len(rows), *given, SMALL.vocab, found.ctypes.data) == 0
        )
        return found

    try:
        yield decode
    finally:
        library.sequence_batches_close(context)
        engine.symbol("llama_model_free", None, ct.c_void_p)(handle)


def run_together(decode: Decode) -> list[Logits]:
    """Return the logits of each sequence: the prompts are one batch, and so is each step of all sequences."""
    found: list[list[Logits]] = [[] for _ in TOKENS]
    begins = [0] * len(TOKENS)
    for step in range(STEPS + 1):
        rows = [
            (tokens[at], at, sequence)
            for sequence, (tokens, begin) in enumerate(zip(TOKENS, begins, strict=True))
            for at in range(begin, LENGTHS[sequence] + step)
        ]
        for (_, _, sequence), logits in zip(rows, decode(rows), strict=True):
            found[sequence].append(logits)
        begins = [length + step for length in LENGTHS]
    return [np.stack(logits) for logits in found]


def run_alone(decode: Decode) -> list[Logits]:
    """Return the same of each sequence by itself, one after another."""
    found = []
    for sequence, (tokens, length) in enumerate(zip(TOKENS, LENGTHS, strict=True)):
        rows = [(token, at, sequence) for at, token in enumerate(tokens)]
        found.append(np.concatenate([decode(rows[:length]), *(decode([row]) for row in rows[length:])]))
    return found


@pytest.fixture(scope="module")
def stock(library: ct.CDLL, loaded_engine: LoadedEngine, model_file: Path) -> list[Logits]:
    """The stock engine's logits of the sequences together."""
    with (
        LlamaModel.open(loaded_engine, model_file, repack=False) as model,
        decoding(library, loaded_engine, model) as decode,
    ):
        return run_together(decode)


@pytest.mark.parametrize("n_slots", [1, SMALL.top_k, SMALL.experts])
def test_sequences_in_one_batch_do_not_mix(library, loaded_engine, model_file, stock, n_slots):
    found = []
    for run in (run_together, run_alone):
        with (
            make_tiers(model_file, n_slots) as tiers,
            LlamaModel.open(loaded_engine, model_file, tiers=TierSet.of(tiers)) as model,
            decoding(library, loaded_engine, model) as decode,
        ):
            found.append(run(decode))
            assert model.binding.take_error() == ("", None)
            assert_nothing_held(tiers)
    for together, alone, expected in zip(*found, stock, strict=True):
        assert together.tobytes() == expected.tobytes()
        np.testing.assert_allclose(together, alone, rtol=0, atol=ROUNDING)
    assert np.abs(stock[0][:5] - stock[1][:5]).max() > 1, "the sequences differ"
