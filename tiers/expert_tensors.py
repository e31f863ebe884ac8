"""Which tensors of a GGUF are experts."""

from __future__ import annotations

import re
from collections.abc import Mapping
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

_ROLE_SETS = (
    (Role.GATE, Role.UP, Role.DOWN),
    (Role.GATE_UP, Role.DOWN),
    (Role.UP, Role.DOWN),
)
"""The matrices that one expert may have, in the order in which a slot holds them."""


def collect_layers(path: Path, header: GgufHeader) -> tuple[tuple[ExpertLayer, ...], int]:
    """Return the MoE layers of a model and how many experts a token uses.

    Raises as `ExpertTable.from_gguf` does.
    """
    _refuse_shards(path, header)
    _check_data(path, header)
    patterns = _patterns()
    blocks: dict[int, dict[Role, TensorInfo]] = {}
    for tensor in header.tensors:
        found = _match(patterns, tensor.name)
        if found is not None:
            block, role = found
            blocks.setdefault(block, {})[role] = tensor
        else:
            _refuse_unknown_experts(path, tensor)
    top_k = header.values.get(_key("EXPERT_USED_COUNT", header))
    if not blocks:
        raise NotMoeError(
            f"{path} ({header.architecture}, {len(header.tensors)} tensors) has no expert tensors such as "
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
        patterns[role] = re.compile(rf"{re.escape(head)}(\d+){re.escape(tail)}\.weight")
    return patterns


def _match(patterns: Mapping[Role, re.Pattern[str]], name: str) -> tuple[int, Role] | None:
    for role, pattern in patterns.items():
        match = pattern.fullmatch(name)
        if match:
            return int(match[1]), role
    return None


def _refuse_shards(path: Path, header: GgufHeader) -> None:
    import gguf

    key = gguf.Keys.Split.LLM_KV_SPLIT_COUNT
    count = header.values.get(key, 1)
    if count not in (0, 1):
        raise UnsupportedLayoutError(
            f"{path} is one of {count} shards ({key}): shards are not followed yet; merge them first with "
            "gguf-split --merge FIRST_SHARD OUTPUT"
        )


def _refuse_unknown_experts(path: Path, tensor: TensorInfo) -> None:
    """Refuse experts under names or in shapes that no engine of today uses."""
    one_tensor_an_expert = re.fullmatch(r"blk\.\d+\.ffn_(gate|up|down)\.\d+\.weight", tensor.name)
    stacked = len(tensor.dims) == 3 and tensor.name.endswith("_exps.weight")
    if one_tensor_an_expert or stacked:
        raise UnsupportedLayoutError(
            f"{path}: expert tensor {tensor.name} of shape {list(tensor.dims)} is in an unknown layout; "
            "convert the model again with a current llama.cpp"
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
        n_bytes = _tensor_bytes(tensor)
        end = tensor.offset + (n_bytes or 0)
        if end > header.file_stat.st_size:
            raise TruncatedModelError(
                f"{path} is cut short: {tensor.name} needs the bytes {tensor.offset} to {end}, the file ends "
                f"at {header.file_stat.st_size}; download it again"
            )
        before = tensor.name


def _tensor_bytes(tensor: TensorInfo) -> int | None:
    """Return the bytes of a tensor; None for a type or row length that the gguf package does not know."""
    import gguf

    sizes = {int(kind): size for kind, size in gguf.GGML_QUANT_SIZES.items()}
    if tensor.ggml_type not in sizes:
        return None
    block_elements, block_bytes = sizes[tensor.ggml_type]
    if tensor.dims[0] % block_elements:
        return None
    n_bytes = tensor.dims[0] // block_elements * block_bytes
    for rows in tensor.dims[1:]:
        n_bytes *= rows
    return n_bytes


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

    n_bytes = _tensor_bytes(tensor)
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
