"""Models that replay recorded routing, on the real engine: the experts that it uses, and its hits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine_runs.tiered_runs import make_tiers
from expertier.engine_adapter.binding.lookup_log import Lookup, LookupLog
from expertier.engine_adapter.llama_cpp import LoadedEngine
from expertier.engine_adapter.models.synth_arch import ARCHITECTURES
from expertier.engine_adapter.models.trace_model import (
    FIRST_TOKEN,
    TraceModel,
    trace_tokens,
    write_trace_model,
)
from expertier.planner import PolicyKind
from model_files.trace_models import I32, opened, random_ids, recorded_ids, replayed, shape_for

STEPS = 200
EXPERTS = 32


@pytest.fixture(scope="module")
def ids() -> I32:
    return recorded_ids(STEPS)


@pytest.fixture(scope="module")
def recorded_model(ids: I32, tmp_path_factory: pytest.TempPathFactory) -> TraceModel:
    """A model of 24 layers that replays gpt-oss-20b routing."""
    path = tmp_path_factory.mktemp("trace") / "m.gguf"
    return write_trace_model(path, ids, shape_for(ids, EXPERTS))


def recorded_lookups(step: I32) -> list[Lookup]:
    """What the engine looks up for one recorded step [layers, top-k]: the proxy asks in ascending order."""
    return [Lookup(layer, tuple(sorted(experts))) for layer, experts in enumerate(step.tolist())]


def assert_replays(engine: LoadedEngine, model: Path, ids: I32, n_slots: int) -> None:
    """Feed the steps' tokens one by one: each layer must use the recorded experts, and miss as the policy alone."""
    n_experts = 8 if ids.max() < 8 else EXPERTS
    log = LookupLog()
    with make_tiers(model, n_slots) as tiers:
        with opened(engine, model, tiers, 2 * len(ids), log) as (_, context):
            for position, token in enumerate(trace_tokens(len(ids))):
                context.decode([token], position)
                assert log.take() == recorded_lookups(ids[position]), position
        tiers.check_valid()
        l1 = tiers.stats().l1
    assert (l1.hits, l1.misses) == replayed(ids, n_experts, n_slots, PolicyKind.LFU_DECAY)
    assert l1.misses > 0


@pytest.mark.parametrize(
    "n_slots", [pytest.param(8, marks=pytest.mark.deep), 16, pytest.param(24, marks=pytest.mark.deep)]
)
def test_the_engine_uses_the_recorded_experts_and_hits_as_the_policy_alone(
    loaded_engine: LoadedEngine, recorded_model: TraceModel, ids: I32, n_slots: int
) -> None:
    assert_replays(loaded_engine, recorded_model.path, ids, n_slots)


@pytest.mark.parametrize("name", [name for name, arch in ARCHITECTURES.items() if arch.replays])
def test_every_architecture_replays(tmp_path: Path, loaded_engine: LoadedEngine, name: str) -> None:
    ids = random_ids(steps=60, layers=4, experts=8, top_k=2)
    model = write_trace_model(tmp_path / "m.gguf", ids, shape_for(ids, 8, name), repeat=True)
    assert_replays(loaded_engine, model.path, ids, 4)


def test_orthogonal_codes_replay_where_layers_do_not_fit(tmp_path: Path, loaded_engine: LoadedEngine) -> None:
    ids = random_ids(steps=256, layers=24, experts=EXPERTS, top_k=4)
    assert ids.max() >= 8
    shape = shape_for(ids[:, :8], EXPERTS)
    assert shape.n_embd == 256 < 24 * EXPERTS
    model = write_trace_model(tmp_path / "m.gguf", ids, shape)
    assert not model.per_layer
    assert_replays(loaded_engine, model.path, ids, 16)


def test_greedy_decoding_replays_by_itself_and_starts_again(
    tmp_path: Path, loaded_engine: LoadedEngine
) -> None:
    ids = random_ids(steps=50, layers=4, experts=8, top_k=2)
    ids[30] = ids[7]  # steps that chose the same experts everywhere must not be taken for each other
    path = write_trace_model(tmp_path / "m.gguf", ids, shape_for(ids, 8)).path
    log = LookupLog()
    with make_tiers(path, 8) as tiers, opened(loaded_engine, path, tiers, 256, log) as (model, context):
        context.decode([model.tokenize("")[0]], 0)
        for position in range(1, 126):
            token = context.sample()
            assert token == FIRST_TOKEN + (position - 1) % 50
            log.take()
            context.decode([token], position)
            assert log.take() == recorded_lookups(ids[(position - 1) % 50]), position


def test_a_batch_of_steps_uses_the_experts_of_all(tmp_path: Path, loaded_engine: LoadedEngine) -> None:
    ids = random_ids(steps=50, layers=4, experts=8, top_k=2)
    path = write_trace_model(tmp_path / "m.gguf", ids, shape_for(ids, 8)).path
    log = LookupLog()
    with make_tiers(path, 8) as tiers, opened(loaded_engine, path, tiers, 256, log) as (_, context):
        # Where only the last token's logits are kept, the engine's last layer runs that token alone.
        context.decode(trace_tokens(3), 0, all_logits=True)
        expected = [Lookup(layer, tuple(np.unique(ids[:3, layer]).tolist())) for layer in range(4)]
        assert log.take() == expected
        assert log.take() == []


def test_a_call_with_more_experts_than_slots_is_several_lookups(
    tmp_path: Path, loaded_engine: LoadedEngine
) -> None:
    ids = random_ids(steps=50, layers=2, experts=8, top_k=4)
    path = write_trace_model(tmp_path / "m.gguf", ids, shape_for(ids, 8)).path
    log = LookupLog()
    with make_tiers(path, 3) as tiers, opened(loaded_engine, path, tiers, 256, log) as (_, context):
        context.decode(trace_tokens(1), 0)
        lookups = log.take()
    for layer in range(2):
        parts = [lookup.experts for lookup in lookups if lookup.layer == layer]
        assert len(parts) == 2
        assert sorted(expert for part in parts for expert in part) == sorted(ids[0, layer].tolist())
