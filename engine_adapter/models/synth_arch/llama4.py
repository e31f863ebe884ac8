"""Llama 4: every second layer has experts; a shared expert, sigmoid gates.

A router's weight scales the input of its expert, so each expert of a token reads a row of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, MODEL_TENSOR, GGUFWriter

from expertier.engine_adapter.models.model_shape import ModelShape
from expertier.engine_adapter.models.synth_arch import common
from expertier.engine_adapter.models.synth_arch.architecture import Architecture
from expertier.engine_adapter.models.synth_arch.tensor import Tensor

_STEP = 2  # the last of so many blocks has experts


def _tensors(shape: ModelShape) -> Iterator[Tensor]:
    yield from common.head(shape)
    for block in range(_STEP * shape.layers):
        yield common.norm(MODEL_TENSOR.ATTN_NORM, shape.n_embd, block)
        yield from common.attention(shape, block)
        yield common.norm(MODEL_TENSOR.FFN_NORM, shape.n_embd, block)
        if (block + 1) % _STEP:
            yield from common.dense(shape, block, common.dense_width(shape))
        else:
            yield common.router(shape, block)
            yield from common.experts(shape, block, block // _STEP)
            yield from common.shared_expert(shape, block)


def _add_keys(writer: GGUFWriter, shape: ModelShape) -> None:
    writer.add_block_count(_STEP * shape.layers)
    writer.add_interleave_moe_layer_step(_STEP)
    writer.add_feed_forward_length(common.dense_width(shape))
    writer.add_expert_feed_forward_length(shape.n_ff)
    common.add_heads(writer, shape)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(5e5)


LLAMA4 = Architecture(MODEL_ARCH_NAMES[MODEL_ARCH.LLAMA4], _tensors, _add_keys)
