"""What is read of a model beside its experts: from tensors and keys, arrays too."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from gguf import GGUFValueType

from expertier.engine_adapter.models.synth import write_model
from expertier.errors import ModelError
from expertier.planner.budget.geometry import BlockMemory, ModelGeometry
from expertier.tiers.model.geometry import read_geometry
from expertier.tiers.model.gguf_header import read_header
from expertier.tiers.model.gguf_numbers import numbers_by_block
from expertier.tiers.model.table import ExpertTable
from model_files.architecture_models import MODELS
from model_files.raw_gguf import RawValue, good_model, write_files


def geometry(tmp_path: Path, kind: str) -> ModelGeometry:
    return read_geometry(write_model(tmp_path / "m.gguf", MODELS[kind], holes=True))


def test_plain_attention(tmp_path: Path) -> None:
    found = geometry(tmp_path, "qwen3moe")
    shape = MODELS["qwen3moe"]
    assert found.blocks == (BlockMemory(128, 128),) * 2
    assert (found.n_embd, found.n_vocab, found.n_heads, found.top_k) == (256, 320, 4, 4)
    assert (found.query_width, found.experts_width, found.dense_width) == (256, 4 * 3 * 256, 0)
    table = ExpertTable.from_gguf(tmp_path / "m.gguf")
    tensors = {tensor.name: tensor.n_bytes or 0 for tensor in read_header(tmp_path / "m.gguf").tensors}
    assert found.host_weight_bytes == tensors["token_embd.weight"] == shape.vocab * shape.n_embd * 4
    assert found.device_weight_bytes + found.host_weight_bytes + table.expert_bytes_total == sum(
        tensors.values()
    )
    assert found.notes == ()


def test_fused_and_split_experts_produce_the_same_width(tmp_path: Path) -> None:
    assert geometry(tmp_path, "deepseek2, fused").experts_width == 4 * 3 * 256
    assert geometry(tmp_path, "deepseek2").experts_width == 4 * 3 * 256
    assert geometry(tmp_path, "llama, no gate").experts_width == 4 * 2 * 256


def test_compressed_attention(tmp_path: Path) -> None:
    found = geometry(tmp_path, "deepseek2")
    assert found.blocks == (BlockMemory(128 + 32),) * 3
    assert found.query_width == 4 * 160
    assert found.dense_width == 512


def test_sliding_windows(tmp_path: Path) -> None:
    assert [block.window for block in geometry(tmp_path, "gpt-oss").blocks] == [64, 0], (
        "the architecture's own"
    )
    assert [block.window for block in geometry(tmp_path, "gemma4").blocks] == [64, 0], "an array in the file"
    assert [block.window for block in geometry(tmp_path, "llama4").blocks] == [8192] * 3 + [0]


def test_recurrent_and_sparse_blocks(tmp_path: Path) -> None:
    state = 4 * (3 * (256 + 2 * 2 * 32) + 32 * 256)
    attention, mamba = BlockMemory(128, 128), BlockMemory(state_bytes=state)
    assert geometry(tmp_path, "nemotron_h_moe").blocks == (attention, BlockMemory(), mamba, BlockMemory())
    sparse = geometry(tmp_path, "qwen4exp")
    assert sparse.blocks[1] == BlockMemory(128, 128, index_width=64)
    assert sparse.blocks[0].state_bytes > 0
    assert sparse.streams == 2


def test_blocks_that_the_engine_does_not_load(tmp_path: Path) -> None:
    found = geometry(tmp_path, "glm4moe")
    table = ExpertTable.from_gguf(tmp_path / "m.gguf")
    assert len(found.blocks) == max(layer.block for layer in table.layers)


def test_a_tied_embedding_lies_on_both_sides(tmp_path: Path) -> None:
    raw = good_model()
    raw.set_number("qwen3moe.block_count", 2)
    found = read_geometry(write_files(tmp_path, [raw.encode()]))
    assert found.host_weight_bytes == 8 * 3 * 4
    assert found.device_weight_bytes == 8 * 3 * 4 + 2 * 8 * 4, "a copy of it, and two norms"


def test_an_architecture_that_was_never_compared_says_so(tmp_path: Path) -> None:
    raw = good_model()
    for value in raw.values:
        value.key = value.key.replace(b"qwen3moe", b"newmoe")
        value.payload = value.payload.replace(b"qwen3moe", b"newmoe").replace(
            struct.pack("<Q", 8), struct.pack("<Q", 6)
        )
    raw.set_number("newmoe.attention.sliding_window", 128)
    found = read_geometry(write_files(tmp_path, [raw.encode()]))
    assert any("newmoe" in note for note in found.notes)
    assert any("sliding window is not known" in note for note in found.notes)


@pytest.mark.parametrize(
    ("kind", "items", "n_blocks", "expected"),
    [
        (GGUFValueType.INT32, [3, 4], 2, [3, 4]),
        (GGUFValueType.UINT64, [3, 4, 5], 2, [3, 4]),
        (GGUFValueType.BOOL, [True, False], 3, [1, 0, 0]),
    ],
)
def test_numbers_by_block(
    tmp_path: Path, kind: GGUFValueType, items: list[int], n_blocks: int, expected: list[int]
) -> None:
    form = {GGUFValueType.INT32: "i", GGUFValueType.UINT64: "Q", GGUFValueType.BOOL: "?"}[kind]
    raw = good_model()
    payload = struct.pack(f"<IQ{len(items)}{form}", kind, len(items), *items)
    raw.values.append(RawValue(b"some.array", GGUFValueType.ARRAY, payload))
    raw.set_number("one.number", 7)
    path = write_files(tmp_path, [raw.encode()])
    header = read_header(path)
    assert numbers_by_block(path, header, "some.array", n_blocks) == expected
    assert numbers_by_block(path, header, "one.number", n_blocks) == [7] * n_blocks
    assert numbers_by_block(path, header, "no.such.key", n_blocks) is None


def test_what_is_no_whole_number(tmp_path: Path) -> None:
    raw = good_model()
    raw.values.append(
        RawValue(
            b"some.floats", GGUFValueType.ARRAY, struct.pack("<IQ2f", GGUFValueType.FLOAT32, 2, 1.0, 2.0)
        )
    )
    raw.set_number("half", 0.5, GGUFValueType.FLOAT32)
    path = write_files(tmp_path, [raw.encode()])
    header = read_header(path)
    for key in ("some.floats", "tokenizer.ggml.tokens", "half", "general.architecture"):
        with pytest.raises(ModelError, match="whole number"):
            numbers_by_block(path, header, key, 2)
