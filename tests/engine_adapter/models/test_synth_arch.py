"""The architectures of random models: their names, shapes and rules, without an engine."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import gguf
import pytest

from engine_runs.tiered_runs import SMALL
from expertier.engine_adapter.models.model_shape import ModelShape
from expertier.engine_adapter.models.synth import model_tensors, write_model
from expertier.engine_adapter.models.synth_arch import ARCHITECTURES
from expertier.errors import ConfigError
from expertier.tiers.model.table import ExpertTable
from model_files.architecture_models import MODELS, UNUSED_LAYERS

IN_GGUF = {gguf.MODEL_ARCH_NAMES[arch]: arch for arch in gguf.MODEL_ARCH}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Each model of the parity tests: its kind and its file."""
    kind = str(request.param)
    return kind, write_model(tmp_path_factory.mktemp("arch") / "m.gguf", MODELS[kind])


def test_every_architecture_has_a_model() -> None:
    assert {shape.architecture for shape in MODELS.values()} == set(ARCHITECTURES)


def test_the_table_finds_the_experts_that_the_shape_says(model: tuple[str, Path]) -> None:
    kind, path = model
    shape, table = MODELS[kind], ExpertTable.from_gguf(path)
    assert table.architecture == shape.architecture
    assert table.top_k == shape.top_k
    layers = table.layers[: table.n_layers - UNUSED_LAYERS.get(kind, 0)]
    assert len(layers) == shape.layers
    assert layers[0].expert_bytes == shape.expert_bytes
    assert sum(layer.n_experts * layer.expert_bytes for layer in layers) == shape.expert_bytes_total
    for number, layer in enumerate(layers):
        assert layer.top_k == shape.top_k_of(number)
        kinds = [gguf.GGMLQuantizationType(matrix.ggml_type).name for matrix in layer.matrices]
        gate_up, down = shape.expert_types(number)
        assert kinds == [gate_up] * (len(kinds) - 1) + [down]


def test_names_are_the_gguf_packages(model: tuple[str, Path]) -> None:
    kind, _ = model
    arch = IN_GGUF.get(MODELS[kind].architecture)
    if arch is None:
        pytest.skip(f"this gguf package does not know {MODELS[kind].architecture}")
    known = {gguf.TENSOR_NAMES[tensor] for tensor in gguf.MODEL_TENSORS[arch]}
    # Optional ones that the engine takes for every architecture, or that the package's list for one leaves out.
    known |= {gguf.TENSOR_NAMES[gguf.MODEL_TENSOR[f"FFN_{role}_EXP"]] for role in ("GATE", "UP", "GATE_UP")}
    for tensor in model_tensors(MODELS[kind]):
        stem = re.sub(r"^blk\.\d+\.", "blk.{bid}.", tensor.name)
        assert re.sub(r"\.(weight|bias|scale)$", "", stem) in known


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_same_shape_gives_the_same_file(tmp_path: Path, architecture: str) -> None:
    shape = next(shape for shape in MODELS.values() if shape.architecture == architecture)
    first = write_model(tmp_path / "a.gguf", shape).read_bytes()
    assert write_model(tmp_path / "b.gguf", shape).read_bytes() == first


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (replace(SMALL, architecture="rwkv"), r"architecture 'rwkv' can be made; known are qwen3moe, llama"),
        (replace(SMALL, expert_layout="fused"), r"as qwen3moe: expert_layout is 'fused'; .*\['split'\]"),
        (
            replace(SMALL, architecture="olmoe"),
            "as olmoe: heads, kv_heads and head_dim are 4, 2 and 64; .* must be n_embd = 256",
        ),
        (
            replace(SMALL, architecture="deepseek2", dense_type="Q4_K"),
            r"the rows of blk\.0\.attn_q_b\.weight have 128 weights; Q4_K needs a multiple of 256",
        ),
    ],
    ids=["architecture", "layout", "heads", "blocks"],
)
def test_a_shape_that_the_architecture_cannot_have(tmp_path: Path, shape: ModelShape, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        write_model(tmp_path / "m.gguf", shape)
    assert list(tmp_path.iterdir()) == []
