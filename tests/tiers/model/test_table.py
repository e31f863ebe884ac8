"""The expert table: what it says of good files, and how it refuses bad ones."""

from __future__ import annotations

import re
import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest

from expertier.errors import (
    ModelError,
    NotGgufError,
    NotMoeError,
    TruncatedModelError,
    UnsupportedLayoutError,
)
from expertier.tiers.model.block_weights import read_block_weights
from expertier.tiers.model.geometry import read_geometry
from expertier.tiers.model.table import ExpertTable
from expertier.units import MIB
from model_files.gguf_files import Block, ModelFile, add_experts, expert_array, write_model


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> ModelFile:
    """A dense block first, then one with three matrices of two types, then a fused one of another size."""
    blocks = [
        None,
        Block(types=("Q4_K", "Q4_K", "Q6_K"), n_embd=256, n_ff=256),
        Block(n_experts=5, roles=("gate_up", "down"), types=("MXFP4", "MXFP4")),
    ]
    return write_model(tmp_path_factory.mktemp("model") / "mixed.gguf", blocks, top_k=3)


def test_layers_count_from_zero_over_blocks_with_experts(mixed: ModelFile) -> None:
    table = mixed.table
    assert [layer.block for layer in table.layers] == [1, 2]
    assert [layer.n_experts for layer in table.layers] == [8, 5]
    assert (table.n_layers, table.top_k, table.architecture) == (2, 3, "qwen3moe")
    assert [str(m.role) for m in table.layers[0].matrices] == ["gate", "up", "down"]
    assert [m.name for m in table.layers[1].matrices] == [
        "blk.2.ffn_gate_up_exps.weight",
        "blk.2.ffn_down_exps.weight",
    ]
    gate = table.layers[0].matrices[0]
    assert (gate.ggml_type, gate.ne0, gate.ne1, gate.type_bytes) == (12, 256, 256, 144)
    assert gate.expert_bytes == 256 * 144


def test_spans_hold_what_the_gguf_package_reads(mixed: ModelFile) -> None:
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(mixed.path).tensors}
    for layer, entry in enumerate(mixed.table.layers):
        for expert in range(entry.n_experts):
            for matrix, found in zip(entry.matrices, mixed.matrix_bytes(layer, expert), strict=True):
                assert found == tensors[matrix.name].data[expert].tobytes()


def test_totals_and_ranges(mixed: ModelFile) -> None:
    table = mixed.table
    sizes = [n.n_experts * n.expert_bytes for n in table.layers]
    assert table.expert_bytes_total == sum(sizes) == sum(end - begin for begin, end in table.expert_ranges)
    assert table.file_bytes == mixed.path.stat().st_size
    assert list(table.expert_ranges) == sorted(table.expert_ranges)
    assert len(table.expert_ranges) == 5
    assert table.expert_ranges[-1][1] <= table.file_bytes


def test_demands_follow_the_layers(mixed: ModelFile) -> None:
    demands = mixed.table.layer_demands()
    assert [(d.layer, d.n_experts, d.top_k) for d in demands] == [(0, 8, 3), (1, 5, 3)]
    assert [d.slot_bytes for d in demands] == [layout.slot_bytes for layout in mixed.table.slot_layouts]


@pytest.mark.parametrize(("layer", "expert"), [(-1, 0), (2, 0), (0, 8), (1, 5), (0, -1)])
def test_experts_that_are_not_there(mixed: ModelFile, layer: int, expert: int) -> None:
    with pytest.raises(IndexError, match="asked for"):
        mixed.table.span(layer, expert)


def test_experts_without_a_gate(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m.gguf", [Block(roles=("up", "down"), types=("F16", "BF16"))])
    assert [str(m.role) for m in model.table.layers[0].matrices] == ["up", "down"]


def test_a_relative_path_is_kept_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "m.gguf")
    monkeypatch.chdir(tmp_path)
    assert ExpertTable.from_gguf("m.gguf").path == tmp_path / "m.gguf"


# ---- files that are refused


def refused(path: Path, error: type[ModelError], match: str) -> None:
    with pytest.raises(error, match=match) as caught:
        ExpertTable.from_gguf(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"hello, I am a text file", b"PK\x03\x04" + bytes(100), bytes(64)])
def test_not_a_gguf(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    refused(path, NotGgufError, "is not a GGUF")


def test_a_directory(tmp_path: Path) -> None:
    refused(tmp_path, NotGgufError, "is a directory: give the GGUF file in it")


def test_a_missing_file(tmp_path: Path) -> None:
    refused(tmp_path / "nothing.gguf", NotGgufError, "cannot be read: No such file")


@pytest.mark.parametrize(
    ("version", "message"),
    [(1, "version 1; known are 2 and 3"), (99, "version 99"), (0x03000000, "big-endian")],
)
def test_other_versions(tmp_path: Path, version: int, message: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", version, 0, 0) + bytes(64))
    refused(path, NotGgufError, message)


def test_truncated_anywhere(tmp_path: Path) -> None:
    whole = write_model(tmp_path / "whole.gguf", [Block(n_experts=2)])
    header_end = min(begin for begin, _ in whole.table.expert_ranges)
    offsets = (
        set(range(1, 60)) | set(range(60, header_end, 13)) | set(range(header_end, len(whole.bytes), 997))
    )
    last_end = whole.table.expert_ranges[-1][1]
    offsets |= {len(whole.bytes) - 1, header_end, last_end - 1}
    for n_bytes in sorted(offset for offset in offsets if offset < last_end):
        path = tmp_path / "cut.gguf"
        path.write_bytes(whole.bytes[:n_bytes])
        refused(path, TruncatedModelError, "is cut short|less than the 24")


@pytest.mark.parametrize(("n_tensors", "n_values"), [(1 << 62, 0), (0, 1 << 62), (1 << 20, 1 << 20), (3, 0)])
def test_counts_that_the_file_cannot_hold(tmp_path: Path, n_tensors: int, n_values: int) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, n_tensors, n_values) + bytes(64))
    refused(path, TruncatedModelError, "bytes follow")


def header(values: bytes = b"", n_values: int = 0, tensors: bytes = b"", n_tensors: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, n_tensors, n_values) + values + tensors + bytes(256)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def tensor(name: bytes, dims: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (header(text(b"\xff\xfe") + struct.pack("<I", 4) + bytes(4), 1), "utf-8"),
        (header(text(b"key") + struct.pack("<I", 77), 1), "77 is not a valid GGUFValueType"),
        (header(text(b"key") + struct.pack("<IIQ", 9, 9, 1), 1), "array of ARRAY"),
        (header(text(b"general.alignment") + struct.pack("<II", 4, 24), 1), "Invalid alignment"),
        (header(text(b"general.alignment") + struct.pack("<I", 8) + text(b"32"), 1), "general.alignment"),
        (header(tensors=tensor(b"t", []), n_tensors=1), "0 dimensions"),
        (header(tensors=tensor(b"t", [1] * 5), n_tensors=1), "5 dimensions"),
        (header(tensors=tensor(b"t", [4, 0]), n_tensors=1), "shape"),
        (header(tensors=tensor(b"t", [4, 1 << 63]), n_tensors=1), "shape"),
        (header(tensors=tensor(b"t", [4], offset=5), n_tensors=1), "multiple of 32"),
        (header(tensors=tensor(b"t", [4]) + tensor(b"t", [4], offset=32), n_tensors=2), "same name"),
        (header(tensors=tensor(b"t", [32]) + tensor(b"u", [4], offset=32), n_tensors=2), "u begins within t"),
    ],
)
def test_damaged_headers(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    refused(path, NotGgufError, message)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (header(struct.pack("<Q", 1 << 60), 1), "needs the bytes 32 to"),
        (header(text(b"key") + struct.pack("<IIQ", 9, 8, 1 << 60), 1), "needs the bytes 51 to"),
        (
            header(text(b"key") + struct.pack("<IIQ", 9, 8, 2) + text(b"a") + struct.pack("<Q", 1 << 40), 1),
            "needs the bytes 51 to",
        ),
        (header(text(b"key") + struct.pack("<IIQ", 9, 12, 1 << 60), 1), "needs the bytes 39 to"),
        (header(tensors=tensor(b"t", [1 << 40, 1 << 40]), n_tensors=1), "t needs the bytes"),
    ],
)
def test_lengths_past_the_end(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    refused(path, TruncatedModelError, message)


def test_a_dense_model(tmp_path: Path) -> None:
    path = tmp_path / "dense.gguf"
    with pytest.raises(NotMoeError, match="dense model needs no expert tiers"):
        write_model(path, [None, None])


class Writer:
    """A file that is written tensor by tensor."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.writer = gguf.GGUFWriter(path, "qwen3moe")
        self.writer.add_expert_used_count(2)
        self.rng = np.random.default_rng(0)

    def add(self, name: str, shape: tuple[int, ...]) -> None:
        self.writer.add_tensor(name, np.zeros(shape, np.float32))

    def close(self) -> Path:
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()
        return self.path


@pytest.fixture
def writer(tmp_path: Path) -> Writer:
    return Writer(tmp_path / "odd.gguf")


def test_one_tensor_an_expert(writer: Writer) -> None:
    writer.add("blk.0.ffn_gate.0.weight", (32, 64))
    refused(writer.close(), UnsupportedLayoutError, r"blk\.0\.ffn_gate\.0\.weight of shape \[64, 32\]")


@pytest.mark.parametrize(
    "name",
    [
        "blk.0.ffn_sideways_exps.weight",
        "blk.0.ffn_up_hexps.weight",
        "blk.0.attn_q_exps.weight",
        "enc.blk.0.ffn_up_exps.weight",
    ],
)
def test_stacked_experts_under_another_name(writer: Writer, name: str) -> None:
    add_experts(writer.writer, writer.rng, 0, Block())
    writer.add(name, (2, 32, 64))
    refused(writer.close(), UnsupportedLayoutError, rf"{re.escape(name)} of shape \[64, 32, 2\]")


@pytest.mark.parametrize(
    "names",
    [
        [f"blk.0.ffn_{role}_chexps.weight" for role in ("gate", "up", "down")],  # GroveMoE
        ["blk.0.attn_v_exps.weight"],  # K2 Horizon
    ],
)
def test_a_second_set_beside_the_experts_is_ordinary_weights(writer: Writer, names: list[str]) -> None:
    add_experts(writer.writer, writer.rng, 0, Block())
    before = len(names) * 2 * 32 * 64 * 4
    for name in names:
        writer.add(name, (2, 32, 64))
    path = writer.close()
    table = ExpertTable.from_gguf(path)
    assert [str(matrix.role) for matrix in table.layers[0].matrices] == ["gate", "up", "down"]
    assert table.expert_bytes_total == 8 * table.layers[0].expert_bytes
    assert read_geometry(path).device_weight_bytes == before
    assert sum(read_block_weights(path).bytes_by_block) == before


def test_what_stays_with_the_engine_is_no_expert_matrix(writer: Writer) -> None:
    """Biases and factors of experts, shared experts and the router's own tensors: dense to the engine."""
    add_experts(writer.writer, writer.rng, 0, Block())
    writer.writer.add_expert_used_count(2)
    for name in ("ffn_up_exps.bias", "ffn_down_exps.scale", "exp_probs_b.bias", "ffn_norm_exps.weight"):
        writer.add(f"blk.0.{name}", (8, 32))
    for name in ("ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp", "ffn_gate_inp_shexp", "ffn_gate_inp"):
        writer.add(f"blk.0.{name}.weight", (32, 64))
    table = ExpertTable.from_gguf(writer.close())
    assert [matrix.name for layer in table.layers for matrix in layer.matrices] == [
        f"blk.0.ffn_{role}_exps.weight" for role in ("gate", "up", "down")
    ]


def test_experts_with_two_dimensions(writer: Writer) -> None:
    for role in ("gate", "up", "down"):
        writer.add(f"blk.0.ffn_{role}_exps.weight", (32, 64))
    refused(writer.close(), UnsupportedLayoutError, r"ffn_gate_exps\.weight has the shape \[64, 32\]")


@pytest.mark.parametrize(
    "roles", [("gate", "up"), ("gate_up",), ("gate", "up", "down", "gate_up"), ("down",)]
)
def test_sets_of_matrices_that_are_not_known(writer: Writer, roles: tuple[str, ...]) -> None:
    for role in roles:
        writer.add(f"blk.3.ffn_{role}_exps.weight", (2, 32, 64))
    refused(writer.close(), UnsupportedLayoutError, "experts of block 3 are blk.3.ffn_")


def test_matrices_of_different_numbers_of_experts(writer: Writer) -> None:
    for role, n in (("gate", 4), ("up", 4), ("down", 3)):
        writer.add(f"blk.0.ffn_{role}_exps.weight", (n, 32, 64))
    refused(writer.close(), UnsupportedLayoutError, r"block 0 have \[3, 4\] experts")


@pytest.mark.parametrize("top_k", [None, 0, 9])
def test_top_k_must_be_there_and_fit(tmp_path: Path, top_k: int | None) -> None:
    with pytest.raises(
        UnsupportedLayoutError, match=r"qwen3moe\.expert_used_count is .*; a number from 1 to 8"
    ):
        write_model(tmp_path / "m.gguf", top_k=top_k)


@pytest.mark.parametrize("numbers", [[2, 3], [2, 3, 7]], ids=["one a block", "more than blocks"])
def test_top_k_of_each_layer(tmp_path: Path, numbers: list[int]) -> None:
    blocks = [Block(n_experts=8), Block(n_experts=5)]
    table = write_model(tmp_path / "m.gguf", blocks, top_k=numbers).table
    assert [layer.top_k for layer in table.layers] == [2, 3]
    assert [demand.top_k for demand in table.layer_demands()] == [2, 3]
    assert table.top_k == 3
    assert table.of_layers([0]).top_k == 2
    assert read_geometry(table.path).top_k == 3
    assert read_geometry(table.path).experts_width == 3 * 3 * 32


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ([2], r"expert_used_count is 0 for block 1; a number from 1 to 5 is needed, or an array"),
        ([2, 6], r"expert_used_count is 6 for block 1; a number from 1 to 5"),
        ([-1, 2], r"expert_used_count is -1 for block 0; a number from 1 to 8"),
        ([1.5, 2.0], r"expert_used_count is an array of 2 FLOAT32; .* whole numbers are needed"),
    ],
)
def test_top_k_that_some_layer_cannot_have(tmp_path: Path, numbers: list[float], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        write_model(tmp_path / "m.gguf", [Block(n_experts=8), Block(n_experts=5)], top_k=numbers)


def test_a_block_for_drafting_may_lack_its_number(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m.gguf", top_k=[2, 0], drafting_blocks=1)
    assert [layer.top_k for layer in model.table.layers] == [2, 2]


def test_an_expert_type_that_is_not_known(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m.gguf", [Block(types=("F32", "F32", "F32"))])
    name = b"blk.0.ffn_up_exps.weight"
    place = model.bytes.index(name) + len(name) + 4 + 3 * 8
    assert model.bytes[place : place + 4] == bytes(4)
    model.path.write_bytes(model.bytes[:place] + struct.pack("<I", 250) + model.bytes[place + 4 :])
    refused(model.path, UnsupportedLayoutError, "ggml type 250")


def test_rows_that_do_not_fill_blocks(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m.gguf", [Block(types=("Q4_0", "Q4_0", "Q4_0"))])
    place = model.bytes.index(b"blk.0.ffn_up_exps.weight") + len(b"blk.0.ffn_up_exps.weight") + 4
    model.path.write_bytes(model.bytes[:place] + struct.pack("<Q", 33) + model.bytes[place + 8 :])
    refused(model.path, UnsupportedLayoutError, r"shape \[33, 32, 8\]")


def test_a_large_vocabulary_takes_no_memory(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "words.gguf")
    writer.writer.add_array("tokenizer.ggml.tokens", [f"token{i}" for i in range(50_000)])
    writer.writer.add_array("tokenizer.ggml.scores", [0.5] * 50_000)
    writer.writer.add_tensor(
        "blk.0.ffn_up_exps.weight",
        expert_array(writer.rng, 2, 32, 64, "Q8_0"),
        raw_dtype=gguf.GGMLQuantizationType.Q8_0,
    )
    writer.writer.add_tensor(
        "blk.0.ffn_down_exps.weight",
        expert_array(writer.rng, 2, 64, 32, "Q8_0"),
        raw_dtype=gguf.GGMLQuantizationType.Q8_0,
    )
    path = writer.close()
    tracemalloc.start()
    try:
        assert ExpertTable.from_gguf(path).n_layers == 1
        assert tracemalloc.get_traced_memory()[1] < 4 * MIB
    finally:
        tracemalloc.stop()
