"""Nemotron 3: each block is either attention, a Mamba or experts; experts have a squared ReLU instead of a gate.

It has a shared expert, and sigmoid gates with a selection bias. As in Nemotron Puzzle, layers may differ in how many
experts a token uses and how wide these experts are.
"""

from __future__ import annotations

from collections.abc import Iterator

from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, MODEL_TENSOR, GGUFWriter, Keys

from expertier.engine_adapter.models.model_shape import ModelShape
from expertier.engine_adapter.models.synth_arch import common
from expertier.engine_adapter.models.synth_arch.architecture import Architecture
from expertier.engine_adapter.models.synth_arch.tensor import Tensor

_CONV_KERNEL = 4
_STATE = 32
_GROUPS = 2
_SSM_HEADS = 4


def _kinds(shape: ModelShape) -> list[str]:
    """List the kind of each block: before each block with experts there is attention or a Mamba, in turn."""
    mixers = ("attention", "mamba")
    return [kind for layer in range(shape.layers) for kind in (mixers[layer % 2], "experts")]


def _tensors(shape: ModelShape) -> Iterator[Tensor]:
    yield from common.head(shape)
    for block, kind in enumerate(_kinds(shape)):
        yield common.norm(MODEL_TENSOR.ATTN_NORM, shape.n_embd, block)
        if kind == "attention":
            yield from common.attention(shape, block)
        elif kind == "mamba":
            yield from _mamba(shape, block)
        else:
            yield common.router(shape, block)
            yield common.bias(MODEL_TENSOR.FFN_EXP_PROBS_B, block, shape.experts)
            yield from common.experts(shape, block, block // 2)
            dense = shape.dense_type
            yield common.matrix(MODEL_TENSOR.FFN_UP_SHEXP, block, dense, shape.n_ff, shape.n_embd)
            yield common.matrix(MODEL_TENSOR.FFN_DOWN_SHEXP, block, dense, shape.n_embd, shape.n_ff)


def _mamba(shape: ModelShape, block: int) -> Iterator[Tensor]:
    dense, inner = shape.dense_type, shape.n_embd
    channels = inner + 2 * _GROUPS * _STATE
    yield common.matrix(MODEL_TENSOR.SSM_IN, block, dense, inner + channels + _SSM_HEADS, shape.n_embd)
    yield common.matrix(MODEL_TENSOR.SSM_CONV1D, block, "F32", channels, _CONV_KERNEL)
    yield common.bias(MODEL_TENSOR.SSM_CONV1D, block, channels)
    yield common.bias(MODEL_TENSOR.SSM_DT, block, _SSM_HEADS)
    for tensor, fill in ((MODEL_TENSOR.SSM_A, -0.5), (MODEL_TENSOR.SSM_D, 1.0)):
        name = common.name(tensor, block).removesuffix(".weight")
        yield Tensor(name, "F32", (_SSM_HEADS, 1), fill=fill)
    yield Tensor(common.name(MODEL_TENSOR.SSM_NORM, block), "F32", (_GROUPS, inner // _GROUPS))
    yield common.matrix(MODEL_TENSOR.SSM_OUT, block, dense, shape.n_embd, inner)


def _add_keys(writer: GGUFWriter, shape: ModelShape) -> None:
    kinds = _kinds(shape)
    writer.add_block_count(len(kinds))
    writer.add_feed_forward_length([shape.n_ff if kind == "experts" else 0 for kind in kinds])
    if shape.layer_n_ff:
        widths = [shape.n_ff_of(block // 2) if kind == "experts" else 0 for block, kind in enumerate(kinds)]
        writer.add_array(Keys.LLM.EXPERT_FEED_FORWARD_LENGTH.format(arch=writer.arch), widths)
    else:
        writer.add_expert_feed_forward_length(shape.n_ff)
    if shape.layer_top_k:
        used = [shape.top_k_of(block // 2) if kind == "experts" else 0 for block, kind in enumerate(kinds)]
        writer.add_array(Keys.LLM.EXPERT_USED_COUNT.format(arch=writer.arch), used)
    writer.add_expert_shared_feed_forward_length(shape.n_ff)
    writer.add_expert_shared_count(1)
    writer.add_expert_weights_norm(True)
    writer.add_expert_weights_scale(1.5)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv([shape.kv_heads if kind == "attention" else 0 for kind in kinds])
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_ssm_conv_kernel(_CONV_KERNEL)
    writer.add_ssm_inner_size(shape.n_embd)
    writer.add_ssm_state_size(_STATE)
    writer.add_ssm_time_step_rank(_SSM_HEADS)
    writer.add_ssm_group_count(_GROUPS)
    writer.add_layer_norm_eps(1e-6)


def _rule(shape: ModelShape) -> str | None:
    return f"n_embd is {shape.n_embd}; it must be a multiple of 8" if shape.n_embd % 8 else None


NEMOTRON_H_MOE = Architecture(
    MODEL_ARCH_NAMES[MODEL_ARCH.NEMOTRON_H_MOE],
    _tensors,
    _add_keys,
    layouts=frozenset({"no gate"}),
    rule=_rule,
    varies=True,
)
