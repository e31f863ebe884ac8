"""Llama with experts, as in Mixtral: an expert is as wide as the dense network would be, and may lack the gate."""

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
        yield common.norm(MODEL_TENSOR.FFN_NORM, shape.n_embd, block)
        yield common.router(shape, block)
        yield from common.experts(shape, block, block)


def _add_keys(writer: GGUFWriter, shape: ModelShape) -> None:
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.n_ff)
    common.add_heads(writer, shape)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(1e6)


LLAMA = Architecture(
    MODEL_ARCH_NAMES[MODEL_ARCH.LLAMA], _tensors, _add_keys, layouts=frozenset({"split", "no gate"})
)
