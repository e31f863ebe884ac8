"""Models that replay recorded routing: what the file holds, without an engine."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader
from gguf.quants import dequantize

from expertier.engine_adapter.models.synth_arch import ARCHITECTURES
from expertier.engine_adapter.models.trace_codes import make_codes
from expertier.engine_adapter.models.trace_model import FIRST_TOKEN, default_width, write_trace_model
from expertier.errors import ConfigError
from model_files.trace_models import random_ids, shape_for

IDS = random_ids(steps=40, layers=3, experts=8, top_k=2)


def tensors(path: Path) -> dict[str, np.ndarray]:
    return {tensor.name: tensor.data for tensor in GGUFReader(path).tensors}


@pytest.mark.parametrize("n_embd", [64, 24, 20], ids=["per layer", "per layer, no room left", "orthogonal"])
def test_routers_score_the_recorded_experts_highest(n_embd: int) -> None:
    ids = IDS[:20]
    codes = make_codes(ids, 8, n_embd, seed=1)
    assert codes.per_layer == (n_embd >= 24)
    np.testing.assert_allclose(np.sqrt((codes.codes**2).mean(axis=1)), 1, rtol=1e-5)
    for layer in range(3):
        scores = codes.codes @ codes.router(layer).T
        order = np.argsort(-scores, axis=1)
        np.testing.assert_array_equal(np.sort(order[:, :2]), np.sort(ids[:, layer]))
        ranked = np.sort(scores, axis=1)
        assert (ranked[:, -2] - ranked[:, -3]).min() > 4, "the gap to the experts that were not chosen"


def test_scores_follow_the_recorded_order() -> None:
    codes = make_codes(IDS, 8, 256, seed=1)
    scores = codes.codes @ codes.router(2).T
    chosen = np.take_along_axis(scores, IDS[:, 2], axis=1)
    assert (chosen[:, 0] > chosen[:, 1]).mean() > 0.9  # the noise may turn a few


def test_any_number_of_steps_fits_a_wide_model() -> None:
    ids = random_ids(steps=2000, layers=3, experts=8, top_k=2)
    codes = make_codes(ids, 8, default_width(3, 8, "Q8_0"), seed=1)
    for layer in range(3):
        chosen = np.argsort(-(codes.codes @ codes.router(layer).T), axis=1)[:, :2]
        np.testing.assert_array_equal(np.sort(chosen), np.sort(ids[:, layer]))
    followed = codes.codes @ codes.codes.T  # what the output scores, with equal steps told apart
    assert (followed.argmax(axis=1) == np.arange(2000)).all()


def test_what_does_not_fit_says_what_would() -> None:
    with pytest.raises(
        ConfigError, match=r"40 steps .* 20 wide: make n_embd at least 24 .* at most 20 steps"
    ):
        make_codes(IDS, 8, 20, seed=1)
    with pytest.raises(ConfigError, match="expert 7, but the model is to have 4 experts"):
        make_codes(IDS, 4, 64, seed=1)


def test_the_file_says_what_it_replays(tmp_path: Path) -> None:
    model = write_trace_model(tmp_path / "m.gguf", IDS, shape_for(IDS, 8))
    reader = GGUFReader(model.path)
    values = {name: field.contents() for name, field in reader.fields.items()}
    assert values["expertier.trace.steps"] == 40
    assert values["expertier.trace.first_token"] == FIRST_TOKEN
    assert values["qwen3moe.block_count"] == 3
    assert values["qwen3moe.expert_used_count"] == 2
    assert len(values["tokenizer.ggml.tokens"]) == FIRST_TOKEN + 40
    every = tensors(model.path)
    embedding, output = (
        every["token_embd.weight"].astype(np.float32),
        every["output.weight"].astype(np.float32),
    )
    likeliest = (embedding @ output.T).argmax(axis=1)
    assert likeliest[FIRST_TOKEN:].tolist() == [FIRST_TOKEN + (step + 1) % 40 for step in range(40)]
    assert set(likeliest[:FIRST_TOKEN].tolist()) == {FIRST_TOKEN}, "special tokens lead to the first step"


@pytest.mark.parametrize("repeat", [False, True])
def test_no_two_experts_are_alike(tmp_path: Path, repeat: bool) -> None:
    model = write_trace_model(tmp_path / "m.gguf", IDS, shape_for(IDS, 8), repeat=repeat)
    every = tensors(model.path)
    for role in ("gate", "up", "down"):
        data = np.concatenate([every[f"blk.{block}.ffn_{role}_exps.weight"] for block in range(3)])
        assert len(np.unique(data.reshape(24, -1), axis=0)) == 24


@pytest.mark.parametrize("repeat", [False, True])
def test_the_same_recording_gives_the_same_file(tmp_path: Path, repeat: bool) -> None:
    shape = shape_for(IDS, 8)
    first = write_trace_model(tmp_path / "a.gguf", IDS, shape, repeat=repeat).path.read_bytes()
    assert write_trace_model(tmp_path / "b.gguf", IDS, shape, repeat=repeat).path.read_bytes() == first


def test_repeated_rows_have_the_spread_of_drawn_ones(tmp_path: Path) -> None:
    shape = replace(shape_for(IDS, 8), gate_up_type="Q4_K", n_embd=256, heads=4, kv_heads=4)
    spread = []
    for repeat in (False, True):
        reader = GGUFReader(write_trace_model(tmp_path / "m.gguf", IDS, shape, repeat=repeat).path)
        tensor = next(t for t in reader.tensors if t.name == "blk.1.ffn_up_exps.weight")
        spread.append(dequantize(tensor.data, tensor.tensor_type).std())
    assert spread[0] == pytest.approx(spread[1], rel=0.02)


def test_writing_holds_a_block_in_memory_and_not_the_model(tmp_path: Path) -> None:
    shape = replace(shape_for(IDS, 8), n_embd=1024, n_ff=4096, heads=4, kv_heads=4)
    tracemalloc.start()
    try:
        model = write_trace_model(tmp_path / "m.gguf", IDS, shape, repeat=True)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert model.path.stat().st_size > 250 << 20
    assert peak < 128 << 20


@pytest.mark.parametrize("name", [name for name, arch in ARCHITECTURES.items() if not arch.replays])
def test_architectures_that_cannot(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} models cannot replay a recording; choose one of qwen3moe"):
        write_trace_model(tmp_path / "m.gguf", IDS, replace(shape_for(IDS, 8), architecture=name))
    assert list(tmp_path.iterdir()) == []
