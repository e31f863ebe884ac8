"""Reads the sizes that decide what a model takes beside its experts.

Tensors are the first source, because the engine computes with their true shapes: a block with the tensor `attn_k` keeps
keys as wide as that matrix has rows, and a block with `ssm_conv1d` keeps a state. What tensors do not show comes from
the header's keys: how far a block looks back, and how wide fused queries, keys and values are.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from expertier.planner.budget.geometry import BlockMemory, ModelGeometry
from expertier.tiers.model.expert_tensors import collect_layers
from expertier.tiers.model.file_shards import FileShard, read_file_shards
from expertier.tiers.model.gguf_header import TensorInfo
from expertier.tiers.model.gguf_numbers import numbers_by_block
from expertier.tiers.model.layer import ExpertLayer
from expertier.tiers.model.matrix import Role
from expertier.tiers.model.type_sizes import PACKAGE_TYPES, TypeSizes

_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")
_F32_BYTES = 4

_WINDOW_PERIODS = {
    "gpt-oss": (2, False),
    "llama4": (4, False),
    "gemma2": (2, False),
    "gemma3": (6, False),
    "gemma3n": (5, False),
    "afmoe": (4, False),
    "cohere2": (4, False),
    "cohere2moe": (4, True),
    "exaone-moe": (4, False),
    "smallthinker": (4, True),
}
"""(period, whether the first block of a period is full): llama.cpp's rule where the file does not list sliding blocks.

All blocks of a period have a sliding window except one, which attends to everything: the first or else the last block.
"""

_CHUNKED = {"llama4": 8192}
"""Architectures that attend in chunks of so many tokens without a key in the header that says so."""

_SPARSE_ROWS = {"qwen4exp": 2, "glm5-next": 3}
"""How many rows of indexer keys the engine keeps for each token, for architectures where it pools them."""

_COMPARED = frozenset(
    (
        "qwen3moe",
        "llama",
        "gpt-oss",
        "deepseek2",
        "olmoe",
        "glm4moe",
        "gemma4",
        "llama4",
        "nemotron_h_moe",
        "qwen4exp",
    )
)
"""Architectures whose computed context memory was compared with the engine's (`benchmarks/compute_buffer.py`)."""


def read_geometry(path: str | os.PathLike[str], type_sizes: TypeSizes = PACKAGE_TYPES) -> ModelGeometry:
    """Return the geometry of the model at `path`, which may be any of its shards. Only headers are read.

    Raises the same `ModelError`s as `ExpertTable.from_gguf`.
    """
    shards = read_file_shards(Path(path).absolute(), type_sizes)
    layers = collect_layers(shards, type_sizes)
    experts = {matrix.name for layer in layers for matrix in layer.matrices}
    keys = _Keys(shards[0])
    tensors = {tensor.name: tensor for shard in shards for tensor in shard.header.tensors}
    unused = range(keys.n_blocks - keys.number("nextn_predict_layers", 0), keys.n_blocks)
    used = {name: tensor for name, tensor in tensors.items() if _block_of(name) not in unused}
    embedding = used.get("token_embd.weight")
    host = sum(
        _size(tensor) for name, tensor in used.items() if name.startswith(("token_embd", "per_layer_tok"))
    )
    device = sum(_size(tensor) for name, tensor in used.items() if name not in experts) - host
    if "output.weight" not in used and embedding is not None:
        device += _size(embedding)  # tied weights: the engine copies them to the device that runs the layers
    blocks = _blocks(keys, used)
    heads = keys.by_block("attention.head_count") or [0]
    return ModelGeometry(
        architecture=keys.architecture,
        n_embd=keys.number("embedding_length", embedding.dims[0] if embedding is not None else 0),
        n_vocab=embedding.dims[-1] if embedding is not None else keys.number("vocab_size", 0),
        n_heads=max(heads),
        top_k=max(layer.top_k for layer in layers),
        query_width=_query_width(keys, max(heads), used),
        experts_width=max(map(_experts_width, layers)),
        dense_width=_rows_of(
            used, ("ffn_gate.weight", "ffn_up.weight", "ffn_gate_shexp.weight", "ffn_up_shexp.weight")
        ),
        blocks=blocks,
        device_weight_bytes=device,
        host_weight_bytes=host,
        streams=max(keys.number("hyper_connection.count", 1), 1),
        n_ctx_train=keys.number("context_length", 0),
        notes=(*_notes(keys), *_uncounted(used)),
    )


class _Keys:
    """The header's numbers, by their keys without the architecture's name in front."""

    def __init__(self, shard: FileShard) -> None:
        self._path, self._header = shard.path, shard.header
        self.architecture = shard.header.architecture
        self.n_blocks = self.number("block_count", 0)

    def number(self, name: str, default: int) -> int:
        value: Any = self._header.values.get(f"{self.architecture}.{name}", default)
        return value if isinstance(value, int) else default

    def by_block(self, name: str) -> list[int] | None:
        return numbers_by_block(
            self._path, self._header, f"{self.architecture}.{name}", max(self.n_blocks, 1)
        )


def _blocks(keys: _Keys, tensors: Mapping[str, TensorInfo]) -> tuple[BlockMemory, ...]:
    by_block: dict[int, dict[str, TensorInfo]] = {}
    for name, tensor in tensors.items():
        found = _BLOCK.fullmatch(name)
        if found is not None:
            by_block.setdefault(int(found[1]), {})[found[2]] = tensor
    windows = _windows(keys)
    n_shared = keys.number("attention.shared_kv_layers", 0)  # these use the cache of an earlier block
    memories = []
    for block in sorted(by_block):
        has = by_block[block]
        if block >= keys.n_blocks - n_shared > 0 and n_shared:
            continue
        memories.append(_block(keys, has, windows[block] if block < len(windows) else 0, block))
    return tuple(memories)


def _block(keys: _Keys, has: Mapping[str, TensorInfo], window: int, block: int) -> BlockMemory:
    conv = has.get("ssm_conv1d.weight")
    if conv is not None:
        state = keys.number("ssm.state_size", 0) * keys.number("ssm.inner_size", 0)
        return BlockMemory(state_bytes=_F32_BYTES * ((conv.dims[0] - 1) * conv.dims[1] + state))
    compressed = has.get("attn_kv_a_mqa.weight")
    if compressed is not None:
        if "attn_k_b.weight" in has:
            return BlockMemory(k_width=compressed.dims[1], window=window)
        heads, k_width, v_width = (keys.number(name, 0) for name in _EXPANDED)
        return BlockMemory(k_width=heads * k_width, v_width=heads * v_width, window=window)
    k, v = has.get("attn_k.weight"), has.get("attn_v.weight")
    if k is not None:
        index = has.get("indexer.k_proj.weight") or has.get("indexer.attn_k.weight")
        index_width = index.dims[1] * _SPARSE_ROWS.get(keys.architecture, 1) if index is not None else 0
        values = v if v is not None else k  # gemma4's full blocks use keys as values
        return BlockMemory(k.dims[1], values.dims[1], window, index_width)
    if "attn_qkv.weight" in has:
        kv_heads = (keys.by_block("attention.head_count_kv") or [0] * (block + 1))[block]
        width = keys.number("embedding_length", 0) // max(
            max(keys.by_block("attention.head_count") or [1]), 1
        )
        return BlockMemory(
            kv_heads * keys.number("attention.key_length", width),
            kv_heads * keys.number("attention.value_length", width),
            window,
        )
    return BlockMemory()


_EXPANDED = ("attention.head_count", "attention.key_length", "attention.value_length")
"""Keys for an old file with compressed attention, whose keys and values the engine expands."""


def _windows(keys: _Keys) -> list[int]:
    """Return how many tokens each block looks back; 0: it attends to all of them."""
    said = keys.number("attention.sliding_window", -1)
    window = _CHUNKED.get(keys.architecture, 0) if said == -1 else said
    if not window:
        return [0] * keys.n_blocks
    pattern = keys.by_block("attention.sliding_window_pattern")
    period, first = _WINDOW_PERIODS.get(keys.architecture, (0, False))
    if pattern is not None and max(pattern, default=0) > 1:  # one number: the period
        period, pattern = pattern[0], None
    if pattern is not None:
        return [window if slides else 0 for slides in pattern]
    if not period:
        return [0] * keys.n_blocks  # which blocks have a sliding window is not known: count all as full
    full = 0 if first else period - 1
    return [0 if block % period == full else window for block in range(keys.n_blocks)]


def _experts_width(layer: ExpertLayer) -> int:
    """Return how many numbers the experts of one token produce in a layer before their last matrix."""
    rows = sum(matrix.ne1 for matrix in layer.matrices if matrix.role is not Role.DOWN)
    gated = any(matrix.role in (Role.GATE, Role.GATE_UP) for matrix in layer.matrices)
    return layer.top_k * (rows + rows // 2 if gated else 2 * rows)


def _query_width(keys: _Keys, heads: int, tensors: Mapping[str, TensorInfo]) -> int:
    if any(name.endswith("attn_k_b.weight") for name in tensors):
        return heads * keys.number("attention.key_length", 0)  # compressed attention, absorbed form
    return max(_rows_of(tensors, ("attn_q.weight",)), heads * keys.number("attention.key_length", 0))


def _rows_of(tensors: Mapping[str, TensorInfo], names: Sequence[str]) -> int:
    """Return the largest number of rows of any block's matrices of these names; 0 where there are none."""
    return max(
        (
            tensor.dims[1]
            for name, tensor in tensors.items()
            if (found := _BLOCK.fullmatch(name)) is not None and found[2] in names and len(tensor.dims) > 1
        ),
        default=0,
    )


def _notes(keys: _Keys) -> tuple[str, ...]:
    notes = []
    if keys.architecture not in _COMPARED:
        notes.append(
            f"the context of {keys.architecture} models was never compared with the engine's: key-value cache and "
            "compute buffer are estimates"
        )
    if keys.number("attention.sliding_window", 0) and not (
        keys.by_block("attention.sliding_window_pattern") or keys.architecture in _WINDOW_PERIODS
    ):
        notes.append("which blocks have a sliding window is not known: all count as full")
    return tuple(notes)


def _uncounted(tensors: Mapping[str, TensorInfo]) -> tuple[str, ...]:
    """Return a note on the weights that are not counted, because the sizes of their types are unknown."""
    types = sorted({tensor.ggml_type for tensor in tensors.values() if tensor.n_bytes is None})
    if not types:
        return ()
    named = ", ".join(map(str, types))
    return (f"weights of the ggml types {named}, whose sizes are not known here, are not counted",)


def _block_of(name: str) -> int:
    found = _BLOCK.fullmatch(name)
    return int(found[1]) if found is not None else -1


def _size(tensor: TensorInfo) -> int:
    return tensor.n_bytes or 0
