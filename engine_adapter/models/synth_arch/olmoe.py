"""OLMoE: queries and keys are normed over all heads, so both have the same number of heads."""

from __future__ import annotations

from collections.abc import Iterator

from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, MODEL_TENSOR, GGUFWriter

from expertier.engine_adapter.models.model_shape import ModelShape
from expertier.engine_adapter.models.synth_arch import common
from expertier.engine_adapter.models.synth_arch.architecture import Architecture
from expertier.engine_adapter.models.synth_arch.tensor import Tensor


def _tensors(shape: ModelShape) -> Iterator[Tensor]:
    yield from common.head(shape)
    for block in range(shape.layers):
        yield common.norm(MODEL_TENSOR.ATTN_NORM, shape.n_embd, block)
        yield from common.attention(shape, block)
        yield common.norm(MODEL_TENSOR.ATTN_Q_NORM, shape.n_embd, block)
        yield common.norm(MODEL_TENSOR.ATTN_K_NORM, shape.n_embd, block)
        yield common.norm(MODEL_TENSOR.FFN_NORM, shape.n_embd, block)
        yield common.router(shape, block)
        yield from common.experts(shape, block, block)


def _add_keys(writer: GGUFWriter, shape: ModelShape) -> None:
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_freq_base(1e4)


def _rule(shape: ModelShape) -> str | None:
    if shape.kv_heads != shape.heads or shape.attention_width != shape.n_embd:
        return (
            f"heads, kv_heads and head_dim are {shape.heads}, {shape.kv_heads} and {shape.head_dim}; heads and "
            f"kv_heads must be equal, and heads * head_dim must be n_embd = {shape.n_embd}"
        )
    return None


OLMOE = Architecture(MODEL_ARCH_NAMES[MODEL_ARCH.OLMOE], _tensors, _add_keys, rule=_rule)
