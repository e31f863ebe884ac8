"""Trace models whose states foretell only a part: the routing is the recording's all the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine_runs.tiered_runs import make_tiers
from expertier.engine_adapter.binding.lookup_log import Lookup, LookupLog
from expertier.engine_adapter.llama_cpp import LoadedEngine
from expertier.engine_adapter.models.model_shape import ModelShape
from expertier.engine_adapter.models.trace_codes import I32
from expertier.engine_adapter.models.trace_drift import RARE_STEPS, make_drifting_codes
from expertier.engine_adapter.models.trace_model import trace_shape, trace_tokens, write_trace_model
from expertier.errors import ConfigError
from model_files.trace_models import opened, random_ids, shape_for

LAYERS, EXPERTS, TOP_K = 4, 16, 4


def drift_shape(ids: I32) -> ModelShape:
    return trace_shape(ids, replace(shape_for(ids, EXPERTS), n_embd=256, heads=4, kv_heads=2))


def found_by_next_routers(ids: I32, recall: float) -> float:
    """The share of each layer's experts that its router finds in the state after the layer before, by plain numbers."""
    shape = drift_shape(ids)
    codes = make_drifting_codes(ids, shape, recall)
    attention = codes.attention(1.0)
    state, found = codes.start.copy(), []
    for layer in range(LAYERS):
        scores = state @ codes.codes.router(layer).T
        if layer > 0:
            chosen = np.argsort(-scores, axis=1)[:, :TOP_K]
            found.append((chosen[:, :, None] == ids[:, layer, None, :]).any(axis=1).mean())
        values = state @ attention[f"blk.{layer}.attn_v.weight"]().T
        # Heads share keys and values: the values are repeated for each of them.
        by_head = values.reshape(len(ids), shape.kv_heads, -1).repeat(shape.heads // shape.kv_heads, axis=1)
        state = state + by_head.reshape(len(ids), -1) @ attention[f"blk.{layer}.attn_output.weight"]().T
        scores = state @ codes.codes.router(layer).T
        assert (np.argsort(-scores, axis=1)[:, :TOP_K] == ids[:, layer]).all(), (
            "its own attention puts it right"
        )
    assert np.allclose(state, codes.codes.codes, atol=1e-4)
    return float(np.mean(found))


@pytest.mark.parametrize("recall", [0.0, 0.6, 0.9, 1.0])
def test_the_next_router_finds_the_share_that_was_asked_for(recall: float) -> None:
    ids = random_ids(steps=400, layers=LAYERS, experts=EXPERTS, top_k=TOP_K)
    found = found_by_next_routers(ids, recall)
    if recall in (0.0, 1.0):
        assert found == recall
    else:
        assert abs(found - recall) < 4 * np.sqrt(recall * (1 - recall) / (400 * 3 * TOP_K))


@pytest.mark.parametrize("recall", [0.0, 0.75])
def test_the_engine_uses_the_recorded_experts(
    tmp_path: Path, loaded_engine: LoadedEngine, recall: float
) -> None:
    ids = random_ids(steps=60, layers=LAYERS, experts=EXPERTS, top_k=TOP_K)
    path = write_trace_model(tmp_path / "m.gguf", ids, drift_shape(ids), recall=recall).path
    log = LookupLog()
    with (
        make_tiers(path, EXPERTS // 2) as tiers,
        opened(loaded_engine, path, tiers, 128, log) as (_, context),
    ):
        for position, token in enumerate(trace_tokens(len(ids))):
            context.decode([token], position)
            expected = [
                Lookup(layer, tuple(sorted(used))) for layer, used in enumerate(ids[position].tolist())
            ]
            assert log.take() == expected, position
        assert context.sample() == trace_tokens(1)[0], "the last step is followed by the first"


def test_rare_experts_are_foretold_less_often() -> None:
    ids = random_ids(steps=400, layers=LAYERS, experts=EXPERTS, top_k=TOP_K)
    codes = make_drifting_codes(ids, drift_shape(ids), 1.0, 0.0)
    parts = codes.start.reshape(400, -1)[:, : LAYERS * EXPERTS].reshape(400, LAYERS, EXPERTS)
    found = np.take_along_axis(parts, ids, axis=2) > 0
    for layer in range(1, LAYERS):
        for step in range(RARE_STEPS, 400):
            recent = np.isin(ids[step, layer], ids[step - RARE_STEPS : step, layer])
            assert (found[step, layer] == recent).all()


def test_shapes_that_cannot_drift() -> None:
    ids = random_ids(steps=8, layers=LAYERS, experts=EXPERTS, top_k=TOP_K)
    shape = drift_shape(ids)
    for recall, changed, message in (
        (1.5, shape, "from 0 to 1"),
        (0.5, replace(shape, architecture="llama"), "only qwen3moe"),
        (0.5, replace(shape, n_embd=128), "at least 192"),
        (0.5, replace(shape, head_dim=4, dense_type="F32"), "kv_heads"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_drifting_codes(ids, changed, recall)
