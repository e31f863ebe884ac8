"""Which tensors of a GGUF are experts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from expertier.errors import (
    NotGgufError,
    NotMoeError,
    TruncatedModelError,
    UnsupportedLayoutError,
)
from expertier.tiers.gguf_header import GgufHeader, TensorInfo
from expertier.tiers.layer import ExpertLayer
from expertier.tiers.matrix import ExpertMatrix, Role
from expertier.tiers.shards import Shard

_ROLE_SETS = (
    (Role.GATE, Role.UP, Role.DOWN),
    (Role.GATE_UP, Role.DOWN),
    (Role.UP, Role.DOWN),
)
"""The matrices that one expert may have, in the order in which a slot holds them."""


def collect_layers(shards: Sequence[Shard]) -> tuple[tuple[ExpertLayer, ...], int]:
    """Return the MoE layers of a model and how many experts a token uses.

    Raises as `ExpertTable.from_gguf` does.
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
                    f"{shard.path} holds {tensor.name} again, as another shard does: it is of another model; "
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
    top_k = header.values.get(_key("EXPERT_USED_COUNT", header))
    if not blocks:
        raise NotMoeError(
            f"{path} ({header.architecture}, {len(names)} tensors) has no expert tensors such as "
            "blk.0.ffn_up_exps.weight: a dense model needs no expert tiers, run it as it is"
        )
    layers = tuple(_layer(path, block, blocks[block]) for block in sorted(blocks))
    most = max(layer.n_experts for layer in layers)
    if not isinstance(top_k, int) or isinstance(top_k, bool) or not 1 <= top_k <= most:
        raise UnsupportedLayoutError(
            f"{path}: {_key('EXPERT_USED_COUNT', header)} is {top_k!r}; a number from 1 to {most} is needed"
        )
    return layers, top_k


def _key(name: str, header: GgufHeader) -> str:
    import gguf

    key: str = getattr(gguf.Keys.LLM, name)
    return key.format(arch=header.architecture)


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
    """Refuse experts under names or in shapes that are not known here: the engine would load them whole."""
    one_tensor_an_expert = re.fullmatch(r"blk\.\d+\.ffn_(gate|up|down)\.\d+\.weight", tensor.name)
    stacked = len(tensor.dims) >= 3 and tensor.name.endswith("exps.weight")
    if one_tensor_an_expert or stacked:
        raise UnsupportedLayoutError(
            f"{path}: expert tensor {tensor.name} of shape {list(tensor.dims)} is in an unknown layout; known are "
            "blk.N.ffn_gate_exps, ffn_up_exps, ffn_gate_up_exps and ffn_down_exps of three dimensions. Convert an "
            "old model again with a current llama.cpp; run any other without the tiers"
        )


def _check_data(path: Path, header: GgufHeader) -> None:
    """Check that every tensor's data lies within the file and no two overlap."""
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


def _layer(path: Path, block: int, tensors: Mapping[Role, TensorInfo]) -> ExpertLayer:
    order = next((roles for roles in _ROLE_SETS if set(roles) == set(tensors)), None)
    if order is None:
        found = ", ".join(f"{tensor.name} {list(tensor.dims)}" for tensor in tensors.values())
        raise UnsupportedLayoutError(
            f"{path}: the experts of block {block} are {found}; known are gate, up and down, gate_up and "
            "down, or up and down"
        )
    matrices = tuple(_matrix(path, role, tensors[role]) for role in order)
    counts = {tensors[role].dims[2] for role in order}
    if len(counts) != 1:
        raise UnsupportedLayoutError(
            f"{path}: the expert tensors of block {block} have {sorted(counts)} experts; one number is needed"
        )
    return ExpertLayer(block, counts.pop(), matrices)


def _matrix(path: Path, role: Role, tensor: TensorInfo) -> ExpertMatrix:
    import gguf

    n_bytes = tensor.n_bytes
    if len(tensor.dims) != 3 or n_bytes is None:
        raise UnsupportedLayoutError(
            f"{path}: expert tensor {tensor.name} has the shape {list(tensor.dims)} and ggml type "
            f"{tensor.ggml_type}; three dimensions and a type that the gguf package knows are needed"
        )
    _, type_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(tensor.ggml_type)]
    ne0, ne1, n_experts = tensor.dims
    return ExpertMatrix(
        role, tensor.name, tensor.ggml_type, type_bytes, ne0, ne1, n_bytes // n_experts, tensor.offset
    )
