"""Finds the expert tensors of a GGUF."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from expertier.errors import (
    NotGgufError,
    NotMoeError,
    TruncatedModelError,
    UnsupportedLayoutError,
)
from expertier.tiers.model.file_shards import FileShard
from expertier.tiers.model.gguf_header import GgufHeader, TensorInfo
from expertier.tiers.model.gguf_numbers import numbers_by_block
from expertier.tiers.model.layer import ExpertLayer
from expertier.tiers.model.matrix import ExpertMatrix, Role
from expertier.tiers.model.type_sizes import PACKAGE_TYPES, TypeSizes

_ROLE_SETS = (
    (Role.GATE, Role.UP, Role.DOWN),
    (Role.GATE_UP, Role.DOWN),
    (Role.UP, Role.DOWN),
)
"""The sets of matrices that an expert may have, each in the order in which a slot holds them."""

_SMALL_SETS = re.compile(r"blk\.\d+\.(ffn_(gate|up|down)_chexps|attn_v_exps)\.weight")
"""Stacked matrices that are no experts and small enough to be ordinary weights: those of GroveMoE and K2 Horizon."""


def collect_layers(
    shards: Sequence[FileShard], type_sizes: TypeSizes = PACKAGE_TYPES
) -> tuple[ExpertLayer, ...]:
    """Return the MoE layers of a model whose headers were read with these `type_sizes`.

    Raises the same errors as `ExpertTable.from_gguf`.
    """
    path, header = shards[0].path, shards[0].header
    patterns = _patterns()
    blocks: dict[int, dict[Role, TensorInfo]] = {}
    names: set[str] = set()
    begin = 0
    for shard in shards:
        _check_data(shard.path, shard.header)
        for tensor in shard.header.tensors:
            if tensor.name in names:
                raise UnsupportedLayoutError(
                    f"{shard.path} holds {tensor.name}, which another shard holds already: it is of another model; "
                    "download it again"
                )
            names.add(tensor.name)
            found = _match(patterns, tensor.name)
            if found is not None:
                block, role = found
                blocks.setdefault(block, {})[role] = replace(tensor, offset=begin + tensor.offset)
            else:
                _refuse_unknown_experts(shard.path, tensor)
        begin += shard.header.file_stat.st_size
    if not blocks:
        raise NotMoeError(
            f"{path} ({header.architecture}, {len(names)} tensors) has no expert tensors such as "
            "blk.0.ffn_up_exps.weight: a dense model needs no expert tiers, run it as it is"
        )
    used = _UsedCounts.read(path, header, n_blocks=max(blocks) + 1)
    layers = [_layer(path, block, blocks[block], type_sizes) for block in sorted(blocks)]
    most = max(layer.n_experts for layer in layers)
    return tuple(replace(layer, top_k=used.of(layer, most)) for layer in layers)


@dataclass(frozen=True, slots=True)
class _UsedCounts:
    """How many experts a token uses: one number for all blocks (`said`), or a number for each block (`numbers`)."""

    path: Path
    key: str
    said: object
    numbers: Sequence[int]
    n_trunk: int
    """The blocks from this number on only predict further tokens; the engine may load no weights of them."""

    @classmethod
    def read(cls, path: Path, header: GgufHeader, n_blocks: int) -> Self:
        import gguf

        architecture = header.architecture
        key = gguf.Keys.LLM.EXPERT_USED_COUNT.format(arch=architecture)
        said = header.values.get(key)
        if isinstance(said, bool) or not isinstance(said, int | None):
            said, numbers = repr(said), []
        else:
            numbers = numbers_by_block(path, header, key, n_blocks) or []
        n_all, n_unused = (
            header.values.get(f"{architecture}.{name}") for name in ("block_count", "nextn_predict_layers")
        )
        n_trunk = n_all - n_unused if isinstance(n_all, int) and isinstance(n_unused, int) else n_blocks
        return cls(path, key, said, numbers, n_trunk)

    def of(self, layer: ExpertLayer, most_experts: int) -> int:
        """Return how many of a layer's experts a token uses.

        A layer with fewer experts than the number for all blocks uses all of its experts.
        """
        one_for_all = self.said is not None
        found = self.numbers[layer.block] if self.numbers else None
        if found == 0 and not one_for_all and layer.block >= self.n_trunk:
            found = min(max(self.numbers), layer.n_experts)
        limit = most_experts if one_for_all else layer.n_experts
        if found is None or not 1 <= found <= limit:
            shown = found if found is not None else self.said
            where = "" if one_for_all or found is None else f" for block {layer.block}"
            raise UnsupportedLayoutError(
                f"{self.path}: {self.key} is {shown}{where}; a number from 1 to {limit} is needed, or an array with "
                "one for each block"
            )
        return min(found, layer.n_experts)


def _patterns() -> Mapping[Role, re.Pattern[str]]:
    import gguf

    tensor = gguf.MODEL_TENSOR
    names = {
        Role.GATE: tensor.FFN_GATE_EXP,
        Role.UP: tensor.FFN_UP_EXP,
        Role.DOWN: tensor.FFN_DOWN_EXP,
        Role.GATE_UP: tensor.FFN_GATE_UP_EXP,
    }
    patterns = {}
    for role, name in names.items():
        head, tail = gguf.TENSOR_NAMES[name].split("{bid}")
        patterns[role] = re.compile(rf"{re.escape(head)}(0|[1-9][0-9]{{0,5}}){re.escape(tail)}\.weight")
    return patterns


def _match(patterns: Mapping[Role, re.Pattern[str]], name: str) -> tuple[int, Role] | None:
    for role, pattern in patterns.items():
        match = pattern.fullmatch(name)
        if match:
            return int(match[1]), role
    return None


def _refuse_unknown_experts(path: Path, tensor: TensorInfo) -> None:
    """Raise where a tensor holds experts under an unknown name or shape, because the engine would load all of them."""
    if _SMALL_SETS.fullmatch(tensor.name):
        return
    one_tensor_an_expert = re.fullmatch(r"blk\.\d+\.ffn_(gate|up|down)\.\d+\.weight", tensor.name)
    stacked = len(tensor.dims) >= 3 and tensor.name.endswith("exps.weight")
    if one_tensor_an_expert or stacked:
        raise UnsupportedLayoutError(
            f"{path}: expert tensor {tensor.name} of shape {list(tensor.dims)} is in an unknown layout; known are "
            "blk.N.ffn_gate_exps, ffn_up_exps, ffn_gate_up_exps and ffn_down_exps of three dimensions. Convert an "
            "old model again with a current llama.cpp; run any other without the tiers"
        )


def _check_data(path: Path, header: GgufHeader) -> None:
    """Check that the data of every tensor lies within the file and that no two tensors overlap."""
    end = 0
    before = "the header"
    for tensor in sorted(header.tensors, key=lambda tensor: tensor.offset):
        if tensor.offset < end:
            raise NotGgufError(
                f"{path} is a damaged GGUF: {tensor.name} begins within {before}; download it again"
            )
        n_bytes = tensor.n_bytes
        end = tensor.offset + (n_bytes or 0)
        if end > header.file_stat.st_size:
            raise TruncatedModelError(
                f"{path} is cut short: {tensor.name} needs the bytes {tensor.offset} to {end}, the file ends "
                f"at {header.file_stat.st_size}; download it again"
            )
        before = tensor.name


def _layer(path: Path, block: int, tensors: Mapping[Role, TensorInfo], type_sizes: TypeSizes) -> ExpertLayer:
    """Return a block's experts, with a `top_k` of 0: how many of them a token uses is not known yet."""
    order = next((roles for roles in _ROLE_SETS if set(roles) == set(tensors)), None)
    if order is None:
        found = ", ".join(f"{tensor.name} {list(tensor.dims)}" for tensor in tensors.values())
        raise UnsupportedLayoutError(
            f"{path}: the experts of block {block} are {found}; known are gate, up and down, gate_up and "
            "down, or up and down"
        )
    matrices = tuple(_matrix(path, role, tensors[role], type_sizes) for role in order)
    counts = {tensors[role].dims[2] for role in order}
    if len(counts) != 1:
        raise UnsupportedLayoutError(
            f"{path}: the expert tensors of block {block} have {sorted(counts)} experts; one number is needed"
        )
    return ExpertLayer(block, counts.pop(), matrices, top_k=0)


def _matrix(path: Path, role: Role, tensor: TensorInfo, type_sizes: TypeSizes) -> ExpertMatrix:
    what = f"{path}: expert tensor {tensor.name} has the shape {list(tensor.dims)} and ggml type {tensor.ggml_type}"
    if tensor.block is None:
        raise UnsupportedLayoutError(f"{what}, a type that is none that {type_sizes.advice}")
    n_bytes = tensor.n_bytes
    if len(tensor.dims) != 3 or n_bytes is None:
        raise UnsupportedLayoutError(
            f"{what}; three dimensions and rows of whole blocks of {tensor.block.elements} are needed"
        )
    ne0, ne1, n_experts = tensor.dims
    expert_bytes = n_bytes // n_experts
    return ExpertMatrix(
        role, tensor.name, tensor.ggml_type, tensor.block.n_bytes, ne0, ne1, expert_bytes, tensor.offset
    )
