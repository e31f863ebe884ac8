"""Small GGUF files for the tests of the tiers: expert tensors of random bytes, not a model that runs."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

from expertier.tiers.access.lease import ExpertGroup, Lease
from expertier.tiers.model.span import Span
from expertier.tiers.model.table import ExpertTable

GATE_UP_DOWN = ("gate", "up", "down")


@dataclass(frozen=True)
class Block:
    """The experts of one block: their number, roles and the ggml types of these."""

    n_experts: int = 8
    roles: Sequence[str] = GATE_UP_DOWN
    types: Sequence[str] = ("Q4_0", "Q4_0", "Q4_0")
    n_embd: int = 64
    n_ff: int = 32


class ModelFile:
    """A written file with its table and bytes, to compare slots with."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.table = ExpertTable.from_gguf(path)
        self.bytes = path.read_bytes()

    def matrix_bytes(self, layer: int, expert: int) -> list[bytes]:
        """What each matrix of an expert must be."""
        return [self.bytes[offset : offset + size] for offset, size in self.table.span(layer, expert)]

    def wrong_bytes(self, lease: Lease, group: ExpertGroup) -> list[tuple[int, str]]:
        """The (expert, role) pairs of a group whose bytes, seen through the lease, are not the file's."""
        wrong = []
        for number, matrix in enumerate(self.table.layers[lease.layer].matrices):
            view = lease.view(matrix.role)
            for expert, slot in zip(group.experts.tolist(), group.slots.tolist(), strict=True):
                found = ctypes.string_at(view.address + slot * view.stride_bytes, matrix.expert_bytes)
                if found != self.matrix_bytes(lease.layer, expert)[number]:
                    wrong.append((expert, str(matrix.role)))
        return wrong


class BytesSource:
    """A byte source in memory."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def read_into(self, span: Span, buffer: memoryview) -> None:
        buffer[:] = self.data[span.offset : span.end]


def expert_array(rng: np.random.Generator, n_experts: int, rows: int, elements: int, kind: str) -> np.ndarray:
    """Random bytes in the shape in which GGUFWriter takes a quantised 3-d tensor."""
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    return rng.integers(0, 256, (n_experts, rows, elements // block * size), dtype=np.uint8)


def write_model(
    path: Path,
    blocks: Sequence[Block | None] = (Block(), Block()),
    *,
    top_k: int | Sequence[float] | None = 2,
    drafting_blocks: int = 0,
    architecture: str = "qwen3moe",
    seed: int = 0,
) -> ModelFile:
    """Write a file whose block `i` has the experts `blocks[i]`, or none, and return it."""
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(len(blocks))
    writer.add_array("tokenizer.ggml.tokens", ["a", "bb", "ccc"])
    writer.add_array("some.numbers", [1, 2, 3])
    if drafting_blocks:
        writer.add_nextn_predict_layers(drafting_blocks)
    if isinstance(top_k, int):
        writer.add_expert_used_count(top_k)
    elif top_k is not None:
        writer.add_array(f"{architecture}.expert_used_count", top_k)
    writer.add_tensor("token_embd.weight", rng.standard_normal((7, 64)).astype(np.float32))
    for number, block in enumerate(blocks):
        writer.add_tensor(f"blk.{number}.ffn_norm.weight", np.ones(64, np.float32))
        if block is not None:
            add_experts(writer, rng, number, block)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return ModelFile(path)


def add_experts(writer: gguf.GGUFWriter, rng: np.random.Generator, number: int, block: Block) -> None:
    """Add a block's expert tensors."""
    shapes = {
        "gate": (block.n_ff, block.n_embd),
        "up": (block.n_ff, block.n_embd),
        "gate_up": (2 * block.n_ff, block.n_embd),
        "down": (block.n_embd, block.n_ff),
    }
    for role, kind in zip(block.roles, block.types, strict=True):
        data = expert_array(rng, block.n_experts, *shapes[role], kind)
        raw_type = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(f"blk.{number}.ffn_{role}_exps.weight", data, raw_dtype=raw_type)
