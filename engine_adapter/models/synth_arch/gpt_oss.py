"""gpt-oss: biases everywhere, in each expert as well; attention sinks; sliding attention in every second layer."""

from __future__ import annotations

from collections.abc import Iterator

from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, MODEL_TENSOR, GGUFWriter

from expertier.engine_adapter.models.model_shape import ModelShape
from expertier.engine_adapter.models.synth_arch import common
from expertier.engine_adapter.models.synth_arch.architecture import Architecture
from expertier.engine_adapter.models.synth_arch.tensor import Tensor

SLIDING_WINDOW = 64


def _tensors(shape: ModelShape) -> Iterator[Tensor]:
    yield from common.head(shape)
    for block in range(shape.layers):
        yield common.norm(MODEL_TENSOR.ATTN_NORM, shape.n_embd, block)
        yield from common.attention(shape, block, biases=True)
        yield common.bias(MODEL_TENSOR.ATTN_OUT, block, shape.n_embd)
        yield Tensor(common.name(MODEL_TENSOR.ATTN_SINKS, block), "F32", (shape.heads,), 1.0)
        yield common.norm(MODEL_TENSOR.ATTN_POST_NORM, shape.n_embd, block)
        yield common.router(shape, block)
        yield common.bias(MODEL_TENSOR.FFN_GATE_INP, block, shape.experts)
        yield from common.experts(shape, block, block)
        yield common.bias(MODEL_TENSOR.FFN_GATE_EXP, block, shape.experts, shape.n_ff)
        yield common.bias(MODEL_TENSOR.FFN_UP_EXP, block, shape.experts, shape.n_ff)
        yield common.bias(MODEL_TENSOR.FFN_DOWN_EXP, block, shape.experts, shape.n_embd)


def _add_keys(writer: GGUFWriter, shape: ModelShape) -> None:
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_expert_feed_forward_length(shape.n_ff)
    common.add_heads(writer, shape)
    writer.add_sliding_window(SLIDING_WINDOW)
    writer.add_rope_freq_base(1.5e5)


GPT_OSS = Architecture(MODEL_ARCH_NAMES[MODEL_ARCH.GPT_OSS], _tensors, _add_keys)
