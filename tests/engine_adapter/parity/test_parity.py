"""The output through the tiers is the stock engine's own, bit for bit: same wheel, same device, no repacking."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from engine_runs.tiered_runs import (
    DECODE_TOKENS,
    PREFILL_TOKENS,
    SHAPES,
    SMALL,
    Run,
    assert_same_run,
    make_tiers,
    prompt_tokens,
    run_model,
    write_small_model,
)
from expertier.engine_adapter.llama_cpp import LoadedEngine
from model_files.architecture_models import slot_counts

SLOTS = slot_counts(SMALL)


@pytest.fixture(scope="module")
def stock(loaded_engine: LoadedEngine, tmp_path_factory: pytest.TempPathFactory):
    """Stock runs by (kind, ubatch, threads), each run once."""
    folder = tmp_path_factory.mktemp("parity")

    @cache
    def run(kind: str, n_ubatch: int, n_threads: int) -> tuple[Path, Run]:
        path = folder / f"{kind.replace('+', '_')}.gguf"
        if not path.exists():
            write_small_model(folder, kind)
        return path, run_model(loaded_engine, path, None, n_ubatch=n_ubatch, n_threads=n_threads)

    return run


@pytest.mark.parametrize(
    ("n_ubatch", "n_threads"),
    [
        (16, 1),
        (64, 1),
        (512, 1),
        pytest.param(16, 2, marks=pytest.mark.deep),
        pytest.param(64, 2, marks=pytest.mark.deep),
        pytest.param(512, 2, marks=pytest.mark.deep),
    ],
)
@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize("kind", SHAPES)
def test_logits_are_bit_identical(stock, loaded_engine, kind, slots, n_ubatch, n_threads):
    check_parity(stock, loaded_engine, kind, slots, n_ubatch, n_threads)


def test_logits_of_two_threads_are_bit_identical(stock, loaded_engine):
    """Two threads alone, as the threads of a graph spin while they wait: tests beside this one make that slow."""
    check_parity(stock, loaded_engine, "Q4_K+Q6_K", "half", 64, 2)


def check_parity(stock, loaded_engine, kind, slots, n_ubatch, n_threads) -> None:
    path, expected = stock(kind, n_ubatch, n_threads)
    with make_tiers(path, SLOTS[slots]) as tiers:
        found = run_model(loaded_engine, path, tiers, n_ubatch=n_ubatch, n_threads=n_threads)
        tiers.check_valid()

    assert found.logits.shape == (PREFILL_TOKENS + DECODE_TOKENS, SMALL.vocab)
    assert_same_run(found, expected, least_tokens=11)
    assert found.n_graph_splits == 1
    assert found.flash_attention
    # With a slot for each expert the proxy reads no ids once all experts are there.
    assert found.counters.id_reads + found.counters.fully_resident_calls >= SMALL.layers * DECODE_TOKENS
    assert (found.counters.fully_resident_calls > 0) == (slots == "all")
    assert (found.counters.pass_calls > 0) == (SLOTS[slots] < SMALL.experts), "prefill chooses every expert"


def test_one_id_read_a_layer(stock, loaded_engine):
    """Gate, up and down share one look-up: reads grow by one a layer and graph, not by one a matrix."""
    path, _ = stock("Q4_K+Q6_K", 512, 1)
    prompt = prompt_tokens(3)  # of fewer experts than there are slots
    with make_tiers(path, SMALL.experts - 1) as tiers:
        found = run_model(loaded_engine, path, tiers, prompt=prompt)
    assert found.counters.id_reads == SMALL.layers * found.counters.graphs
    assert found.counters.lookups == found.counters.id_reads
