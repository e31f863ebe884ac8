"""GLM-4.5: a leading dense layer, a shared expert, sigmoid gates with a selection bias, and a last block for MTP.

The engine does not load the tensors of the last block, its experts included, unless it is told to draft with them.
"""

from __future__ import annotations

from collections.abc import Iterator

from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, MODEL_TENSOR, ExpertGatingFuncType, GGUFWriter

from expertier.engine_adapter.models.model_shape import ModelShape
from expertier.engine_adapter.models.synth_arch import common
from expertier.engine_adapter.models.synth_arch.architecture import Architecture
from expertier.engine_adapter.models.synth_arch.tensor import Tensor

_N_DENSE = 1
_N_NEXTN = 1


def _tensors(shape: ModelShape) -> Iterator[Tensor]:
    yield from common.head(shape)
    trunk = _N_DENSE + shape.layers
    for block in range(trunk + _N_NEXTN):
        yield common.norm(MODEL_TENSOR.ATTN_NORM, shape.n_embd, block)
        yield from common.attention(shape, block, biases=True)
        yield common.norm(MODEL_TENSOR.ATTN_Q_NORM, shape.head_dim, block)
        yield common.norm(MODEL_TENSOR.ATTN_K_NORM, shape.head_dim, block)
        yield common.norm(MODEL_TENSOR.ATTN_POST_NORM, shape.n_embd, block)
        if block < _N_DENSE:
            yield from common.dense(shape, block, common.dense_width(shape))
        else:
            yield common.router(shape, block)
            yield common.bias(MODEL_TENSOR.FFN_EXP_PROBS_B, block, shape.experts)
            yield from common.experts(shape, block, block - _N_DENSE)
            yield from common.shared_expert(shape, block)
        if block >= trunk:
            eh_proj = common.matrix(
                MODEL_TENSOR.NEXTN_EH_PROJ, block, shape.dense_type, shape.n_embd, 2 * shape.n_embd
            )
            yield eh_proj
            yield common.norm(MODEL_TENSOR.NEXTN_ENORM, shape.n_embd, block)
            yield common.norm(MODEL_TENSOR.NEXTN_HNORM, shape.n_embd, block)


def _add_keys(writer: GGUFWriter, shape: ModelShape) -> None:
    writer.add_block_count(_N_DENSE + shape.layers + _N_NEXTN)
    writer.add_leading_dense_block_count(_N_DENSE)
    writer.add_nextn_predict_layers(_N_NEXTN)
    writer.add_feed_forward_length(common.dense_width(shape))
    writer.add_expert_feed_forward_length(shape.n_ff)
    writer.add_expert_shared_count(1)
    writer.add_expert_weights_scale(1.5)
    writer.add_expert_weights_norm(True)
    writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
    common.add_heads(writer, shape)
    writer.add_rope_dimension_count(shape.head_dim // 2)
    writer.add_rope_freq_base(1e6)


def _rule(shape: ModelShape) -> str | None:
    return f"head_dim is {shape.head_dim}; it must be a multiple of 4" if shape.head_dim % 4 else None


# The engine does not run the last block, which is for drafting: its router would be one without a recorded layer.
GLM4MOE = Architecture(MODEL_ARCH_NAMES[MODEL_ARCH.GLM4_MOE], _tensors, _add_keys, rule=_rule, replays=False)
