"""DeepSeek-V3: compressed attention, a leading dense layer, a shared expert, sigmoid gates with a selection bias.

The biases of the selection change which experts are chosen, not how much they count.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import sqrt

from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, MODEL_TENSOR, ExpertGatingFuncType, GGUFWriter

from expertier.engine_adapter.models.model_shape import ModelShape
from expertier.engine_adapter.models.synth_arch import common
from expertier.engine_adapter.models.synth_arch.architecture import Architecture
from expertier.engine_adapter.models.synth_arch.tensor import Tensor

_N_DENSE = 1


def _tensors(shape: ModelShape) -> Iterator[Tensor]:
    yield from common.head(shape)
    for block in range(_N_DENSE + shape.layers):
        yield from _attention(shape, block)
        yield common.norm(MODEL_TENSOR.FFN_NORM, shape.n_embd, block)
        if block < _N_DENSE:
            yield from common.dense(shape, block, common.dense_width(shape))
        else:
            yield common.router(shape, block)
            yield common.bias(MODEL_TENSOR.FFN_EXP_PROBS_B, block, shape.experts)
            yield from common.experts(shape, block, block - _N_DENSE)
            yield from common.shared_expert(shape, block)


def _attention(shape: ModelShape, block: int) -> Iterator[Tensor]:
    dense, heads, width, rank = shape.dense_type, shape.heads, shape.head_dim, _rank(shape)
    n_rope = _rope_width(shape)
    yield common.norm(MODEL_TENSOR.ATTN_NORM, shape.n_embd, block)
    yield common.matrix(MODEL_TENSOR.ATTN_Q_A, block, dense, rank, shape.n_embd)
    yield common.norm(MODEL_TENSOR.ATTN_Q_A_NORM, rank, block)
    yield common.matrix(MODEL_TENSOR.ATTN_Q_B, block, dense, heads * width, rank)
    yield common.matrix(MODEL_TENSOR.ATTN_KV_A_MQA, block, dense, rank + n_rope, shape.n_embd)
    yield common.norm(MODEL_TENSOR.ATTN_KV_A_NORM, rank, block)
    k_b, v_b = (common.name(tensor, block) for tensor in (MODEL_TENSOR.ATTN_K_B, MODEL_TENSOR.ATTN_V_B))
    yield Tensor(k_b, dense, (heads, rank, width - n_rope), 1 / sqrt(rank))
    yield Tensor(v_b, dense, (heads, width, rank), 1 / sqrt(rank))
    yield common.matrix(MODEL_TENSOR.ATTN_OUT, block, dense, shape.n_embd, heads * width)


def _rank(shape: ModelShape) -> int:
    """Width of the compressed queries, keys and values."""
    return 2 * shape.head_dim


def _rope_width(shape: ModelShape) -> int:
    """Width of the part of a head that knows its position."""
    return shape.head_dim // 2


def _add_keys(writer: GGUFWriter, shape: ModelShape) -> None:
    writer.add_block_count(_N_DENSE + shape.layers)
    writer.add_leading_dense_block_count(_N_DENSE)
    writer.add_feed_forward_length(common.dense_width(shape))
    writer.add_expert_feed_forward_length(shape.n_ff)
    writer.add_expert_shared_count(1)
    writer.add_expert_weights_scale(1.5)
    writer.add_expert_weights_norm(True)
    writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(1)
    writer.add_q_lora_rank(_rank(shape))
    writer.add_kv_lora_rank(_rank(shape))
    writer.add_key_length(_rank(shape) + _rope_width(shape))
    writer.add_value_length(_rank(shape))
    writer.add_key_length_mla(shape.head_dim)
    writer.add_value_length_mla(shape.head_dim)
    writer.add_rope_dimension_count(_rope_width(shape))
    writer.add_rope_freq_base(1e4)


def _rule(shape: ModelShape) -> str | None:
    return f"head_dim is {shape.head_dim}; it must be a multiple of 4" if shape.head_dim % 4 else None


DEEPSEEK2 = Architecture(
    MODEL_ARCH_NAMES[MODEL_ARCH.DEEPSEEK2],
    _tensors,
    _add_keys,
    layouts=frozenset({"split", "fused"}),
    rule=_rule,
)
