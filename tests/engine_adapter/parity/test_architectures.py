"""Parity on every architecture, layout of experts and weight type: logits of stock and of the tiers, bit for bit."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from engine_runs.tiered_runs import Run, assert_same_run, make_tiers, prompt_tokens, run_model
from expertier.engine_adapter.llama_cpp import LoadedEngine
from expertier.engine_adapter.models.model_shape import ModelShape
from expertier.engine_adapter.models.synth import model_tensors, write_model
from expertier.engine_adapter.placement.override_pattern import experts_regex
from expertier.tiers.model.gguf_header import read_header
from expertier.tiers.model.table import ExpertTable
from expertier.units import KIB
from model_files.architecture_models import MODELS, TYPES, UNUSED_LAYERS, slot_counts

PREFILL_TOKENS = 100
DECODE_TOKENS = 24

SHAPES = {**MODELS, **TYPES}


def cases(shapes: dict[str, ModelShape]) -> list[object]:
    """Every model with every number of slots; short and long batches in turn."""
    found = []
    for number, (kind, shape) in enumerate(shapes.items()):
        for place, slots in enumerate(slot_counts(shape)):
            n_ubatch = (64, 512)[(number + place) % 2]
            found.append(pytest.param(kind, slots, n_ubatch, id=f"{kind}-{slots}-{n_ubatch}"))
    return found


@pytest.fixture(scope="module")
def stock(loaded_engine: LoadedEngine, tmp_path_factory: pytest.TempPathFactory):
    """Stock runs by (kind, ubatch, threads), each run once, with the model's path."""
    folder = tmp_path_factory.mktemp("architectures")

    @cache
    def model(kind: str) -> Path:
        return write_model(folder / re.sub(r"\W+", "_", f"{kind}.gguf"), SHAPES[kind])

    @cache
    def run(kind: str, n_ubatch: int, n_threads: int = 1) -> tuple[Path, Run]:
        path = model(kind)
        return path, run_model(loaded_engine, path, None, **options(n_ubatch, n_threads))

    return run


def options(n_ubatch: int, n_threads: int) -> dict[str, object]:
    return {
        "n_ubatch": n_ubatch,
        "n_threads": n_threads,
        "n_tokens": DECODE_TOKENS,
        "prompt": prompt_tokens(PREFILL_TOKENS),
    }


def assert_parity(stock, engine: LoadedEngine, kind: str, slots: str, n_ubatch: int, n_threads: int) -> None:
    path, expected = stock(kind, n_ubatch, n_threads)
    n_slots = slot_counts(SHAPES[kind])[slots]
    with make_tiers(path, n_slots) as tiers:
        found = run_model(engine, path, tiers, **options(n_ubatch, n_threads))
        tiers.check_valid()
        table = tiers.table

    assert_same_run(found, expected, least_tokens=6)
    assert (found.counters.pass_calls > 0) == (n_slots < SHAPES[kind].experts), "prefill chooses every expert"

    # Experts were not read, and nothing but experts went to the tiers: biases, factors and shared experts did not.
    layers = table.layers[: table.n_layers - UNUSED_LAYERS.get(kind, 0)]
    assert found.load.expert_bytes == 0
    assert found.counters.dropped_writes == sum(layer.n_experts * layer.expert_bytes for layer in layers)
    if len(layers) == table.n_layers:
        assert found.load.bytes_read >= table.file_bytes - table.expert_bytes_total - 64 * KIB


@pytest.mark.parametrize(("kind", "slots", "n_ubatch"), cases(MODELS))
def test_architectures(stock, loaded_engine, kind, slots, n_ubatch):
    assert_parity(stock, loaded_engine, kind, slots, n_ubatch, n_threads=1)


@pytest.mark.parametrize(("kind", "slots", "n_ubatch"), cases(TYPES))
def test_weight_types(stock, loaded_engine, kind, slots, n_ubatch):
    assert_parity(stock, loaded_engine, kind, slots, n_ubatch, n_threads=1)


@pytest.mark.deep
@pytest.mark.parametrize(("n_ubatch", "n_threads"), [(16, 1), (64, 1), (64, 2), (512, 1)])
@pytest.mark.parametrize(
    ("kind", "slots"), [(kind, slots) for kind, shape in SHAPES.items() for slots in slot_counts(shape)]
)
def test_every_combination(stock, loaded_engine, kind, slots, n_ubatch, n_threads):
    assert_parity(stock, loaded_engine, kind, slots, n_ubatch, n_threads)


@pytest.mark.parametrize("kind", MODELS)
def test_passes_fetch_an_expert_once_a_call(stock, loaded_engine, kind):
    """One pass runs all of an expert's matrices and the nodes between them: one slot gets each expert once a call."""
    path, _ = stock(kind, 512)
    layers = SHAPES[kind].layers
    with make_tiers(path, 1) as tiers:
        found = run_model(loaded_engine, path, tiers, **(options(512, 1) | {"n_tokens": 0}))
        expert_bytes = tiers.table.expert_bytes_total
    assert found.counters.pass_calls == found.counters.id_reads == layers
    assert found.counters.passes <= layers * SHAPES[kind].experts
    assert found.stats.file.bytes_read <= expert_bytes


@pytest.mark.parametrize("kind", MODELS)
def test_the_override_pattern_matches_expert_matrices_only(stock, kind):
    path, _ = stock(kind, 512)
    table = ExpertTable.from_gguf(path)
    experts = {matrix.name for layer in table.layers for matrix in layer.matrices}
    pattern = re.compile(experts_regex(table))
    assert {tensor.name for tensor in read_header(path).tensors if pattern.search(tensor.name)} == experts


def test_the_models_cover_what_they_are_for():
    names = {kind: {tensor.name for tensor in model_tensors(shape)} for kind, shape in MODELS.items()}
    assert "blk.1.ffn_down_exps.bias" in names["gpt-oss"]
    assert "blk.1.ffn_down_exps.scale" in names["gemma4"]
    assert "blk.1.ffn_up_exps.scale" in names["gemma4, split"]
    assert {"blk.1.exp_probs_b.bias", "blk.1.ffn_up_shexp.weight", "blk.0.ffn_up.weight"} <= names[
        "deepseek2"
    ]
    for kind, shape in MODELS.items():
        fused = "blk.1.ffn_gate_up_exps.weight" in names[kind]
        assert fused == (shape.expert_layout == "fused")


def test_mixed_layers_have_slots_of_both_forms(stock):
    """A slot is one piece where the block sizes allow it, else each matrix has an array of its own."""
    path, _ = stock("qwen3moe, mixed", 512)
    strides = [layout.stride for layout in ExpertTable.from_gguf(path).slot_layouts]
    assert 0 in strides
    assert len({stride for stride in strides if stride}) > 1
