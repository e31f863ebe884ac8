"""Gemma 4 with experts: a dense network beside them, a factor for each expert, norms after sublayers, fused gates.

The factors (`ffn_down_exps.scale`, and those of gate and up where these are tensors of their own) stay with the
engine. Every second layer has sliding attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import sqrt

from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, MODEL_TENSOR, GGUFWriter

from expertier.engine_adapter.models.model_shape import ModelShape
from expertier.engine_adapter.models.synth_arch import common
from expertier.engine_adapter.models.synth_arch.architecture import Architecture
from expertier.engine_adapter.models.synth_arch.tensor import Tensor

_SLIDING_WINDOW = 64


def _tensors(shape: ModelShape) -> Iterator[Tensor]:
    yield from common.head(shape, embedding_std=1 / sqrt(shape.n_embd))  # the engine multiplies by the root
    yield common.norm(MODEL_TENSOR.ROPE_FREQS, shape.head_dim // 2)
    for block in range(shape.layers):
        yield common.norm(MODEL_TENSOR.ATTN_NORM, shape.n_embd, block)
        yield from common.attention(shape, block)
        yield common.norm(MODEL_TENSOR.ATTN_Q_NORM, shape.head_dim, block)
        yield common.norm(MODEL_TENSOR.ATTN_K_NORM, shape.head_dim, block)
        yield common.norm(MODEL_TENSOR.ATTN_POST_NORM, shape.n_embd, block)
        yield common.norm(MODEL_TENSOR.FFN_NORM, shape.n_embd, block)
        yield from common.dense(shape, block, common.dense_width(shape))
        yield common.norm(MODEL_TENSOR.FFN_POST_NORM, shape.n_embd, block)
        yield common.norm(MODEL_TENSOR.FFN_POST_NORM_1, shape.n_embd, block)
        yield common.norm(MODEL_TENSOR.FFN_PRE_NORM_2, shape.n_embd, block)
        yield common.norm(MODEL_TENSOR.FFN_POST_NORM_2, shape.n_embd, block)
        yield common.router(shape, block)
        # The engine divides what the router sees by the root.
        router_scale = common.name(MODEL_TENSOR.FFN_GATE_INP, block, "scale")
        yield Tensor(router_scale, "F32", (shape.n_embd,), fill=sqrt(shape.n_embd))
        yield from common.experts(shape, block, block)
        scaled = [MODEL_TENSOR.FFN_DOWN_EXP]
        if shape.expert_layout == "split":
            scaled += [MODEL_TENSOR.FFN_GATE_EXP, MODEL_TENSOR.FFN_UP_EXP]
        for tensor in scaled:
            yield Tensor(common.name(tensor, block, "scale"), "F32", (shape.experts,), 1.0)
        yield Tensor(common.name(MODEL_TENSOR.LAYER_OUT_SCALE, block), "F32", (1,), fill=0.9)


def _add_keys(writer: GGUFWriter, shape: ModelShape) -> None:
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(common.dense_width(shape))
    writer.add_expert_feed_forward_length(shape.n_ff)
    writer.add_embedding_length_per_layer_input(0)
    common.add_heads(writer, shape)
    writer.add_key_length_swa(shape.head_dim)
    writer.add_value_length_swa(shape.head_dim)
    writer.add_sliding_window(_SLIDING_WINDOW)
    writer.add_sliding_window_pattern([block % 2 == 0 for block in range(shape.layers)])
    writer.add_rope_freq_base(1e6)
    writer.add_rope_freq_base_swa(1e4)
    writer.add_final_logit_softcapping(30.0)


GEMMA4 = Architecture(
    MODEL_ARCH_NAMES[MODEL_ARCH.GEMMA4], _tensors, _add_keys, layouts=frozenset({"split", "fused"})
)
