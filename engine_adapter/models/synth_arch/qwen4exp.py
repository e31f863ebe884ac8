"""Qwen4-exp: several residual streams, linear attention, sparse attention in every second layer, a shared expert.

The gguf package on PyPI does not know this architecture yet: the names that it lacks are taken from the engine's own
`src/llama-arch.cpp`. The n-gram embedding, which is optional, is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import sqrt

from gguf import MODEL_TENSOR, GGUFWriter

from expertier.engine_adapter.models.model_shape import ModelShape
from expertier.engine_adapter.models.synth_arch import common
from expertier.engine_adapter.models.synth_arch.architecture import Architecture
from expertier.engine_adapter.models.synth_arch.tensor import Tensor

_STREAMS = 2
_STREAM_RANK = 64
_ATTENTION_INTERVAL = 2  # the last of so many blocks attends fully
_INDEXER_HEADS = 2
_INDEXER_WIDTH = 32
_INDEXER_TOP_K = 32
_COMPRESS_RATIO = 4
_LINEAR_HEADS = 4  # heads of the values; the keys have half as many
_LINEAR_WIDTH = 32
_CONV_KERNEL = 4


def _tensors(shape: ModelShape) -> Iterator[Tensor]:
    yield Tensor(common.name(MODEL_TENSOR.TOKEN_EMBD), shape.dense_type, (shape.vocab, shape.n_embd), 1.0)
    yield from _mixer(shape, "output_hc")
    yield common.output(shape)
    for block in range(shape.layers):
        for place in ("attn", "ffn"):
            yield from _mixer(shape, f"blk.{block}.hc_{place}")
            yield _matrix(shape, f"blk.{block}.hc_{place}_inject", _STREAMS, _STREAMS * shape.n_embd)
        yield from _sparse_attention(shape, block) if _attends(block) else _linear_attention(shape, block)
        yield common.router(shape, block)
        yield from common.experts(shape, block, block)
        gate = common.name(MODEL_TENSOR.FFN_GATE_INP_SHEXP, block)
        yield Tensor(gate, "F32", (shape.n_embd,), 1 / sqrt(shape.n_embd))
        yield from common.shared_expert(shape, block)


def _matrix(shape: ModelShape, name: str, rows: int, cols: int) -> Tensor:
    return Tensor(f"{name}.weight", shape.dense_type, (rows, cols), 1 / sqrt(cols))


def _mixer(shape: ModelShape, name: str) -> Iterator[Tensor]:
    """Yield the tensors that mix the residual streams into one."""
    width = _STREAMS * shape.n_embd
    yield Tensor(f"{name}_norm.weight", "F32", (width,))
    yield _matrix(shape, f"{name}_down", _STREAM_RANK, width)
    yield _matrix(shape, f"{name}_up", width, _STREAM_RANK)


def _attends(block: int) -> bool:
    return (block + 1) % _ATTENTION_INTERVAL == 0


def _sparse_attention(shape: ModelShape, block: int) -> Iterator[Tensor]:
    dense, embd = shape.dense_type, shape.n_embd
    kv_rows = shape.kv_heads * shape.head_dim
    yield common.matrix(MODEL_TENSOR.ATTN_Q, block, dense, 2 * shape.attention_width, embd)  # and their gates
    yield common.matrix(MODEL_TENSOR.ATTN_K, block, dense, kv_rows, embd)
    yield common.matrix(MODEL_TENSOR.ATTN_V, block, dense, kv_rows, embd)
    yield common.matrix(MODEL_TENSOR.ATTN_OUT, block, dense, embd, shape.attention_width)
    yield common.norm(MODEL_TENSOR.ATTN_Q_NORM, shape.head_dim, block)
    yield common.norm(MODEL_TENSOR.ATTN_K_NORM, shape.head_dim, block)
    yield _matrix(shape, f"blk.{block}.indexer.q_proj", _INDEXER_HEADS * _INDEXER_WIDTH, embd)
    yield _matrix(shape, f"blk.{block}.indexer.k_proj", _INDEXER_WIDTH, embd)
    yield Tensor(f"blk.{block}.indexer.q_norm.weight", "F32", (_INDEXER_WIDTH,))
    yield common.norm(MODEL_TENSOR.INDEXER_K_NORM, _INDEXER_WIDTH, block)


def _linear_attention(shape: ModelShape, block: int) -> Iterator[Tensor]:
    dense, embd, values = shape.dense_type, shape.n_embd, _LINEAR_HEADS * _LINEAR_WIDTH
    channels = 2 * values  # queries, keys and values
    yield common.matrix(MODEL_TENSOR.ATTN_QKV, block, dense, channels, embd)
    yield common.matrix(MODEL_TENSOR.ATTN_GATE, block, dense, values, embd)
    yield common.matrix(MODEL_TENSOR.SSM_CONV1D, block, "F32", channels, _CONV_KERNEL)
    yield common.bias(MODEL_TENSOR.SSM_DT, block, _LINEAR_HEADS)
    decay = common.name(MODEL_TENSOR.SSM_A, block).removesuffix(".weight")
    yield Tensor(decay, "F32", (_LINEAR_HEADS,), fill=-0.5)
    yield common.matrix(MODEL_TENSOR.SSM_BETA, block, dense, _LINEAR_HEADS, embd)
    yield common.matrix(MODEL_TENSOR.SSM_ALPHA, block, dense, _LINEAR_HEADS, embd)
    yield common.norm(MODEL_TENSOR.SSM_NORM, _LINEAR_WIDTH, block)
    yield common.matrix(MODEL_TENSOR.SSM_OUT, block, dense, embd, values)


def _add_keys(writer: GGUFWriter, shape: ModelShape) -> None:
    writer.add_block_count(shape.layers)
    writer.add_expert_feed_forward_length(shape.n_ff)
    writer.add_expert_shared_feed_forward_length(shape.n_ff)
    common.add_heads(writer, shape)
    writer.add_full_attention_interval(_ATTENTION_INTERVAL)
    writer.add_indexer_head_count(_INDEXER_HEADS)
    writer.add_indexer_key_length(_INDEXER_WIDTH)
    writer.add_indexer_top_k(_INDEXER_TOP_K)
    writer.add_array(
        "qwen4exp.attention.compress_ratios",
        [_COMPRESS_RATIO if _attends(block) else 0 for block in range(shape.layers)],
    )
    writer.add_uint32("qwen4exp.hyper_connection.count", _STREAMS)
    writer.add_uint32("qwen4exp.hyper_connection.low_rank", _STREAM_RANK)
    writer.add_ssm_conv_kernel(_CONV_KERNEL)
    writer.add_ssm_state_size(_LINEAR_WIDTH)
    writer.add_ssm_inner_size(_LINEAR_HEADS * _LINEAR_WIDTH)
    writer.add_ssm_time_step_rank(_LINEAR_HEADS)
    writer.add_ssm_group_count(_LINEAR_HEADS // 2)
    writer.add_rope_dimension_count(_INDEXER_WIDTH)
    writer.add_rope_dimension_sections([6, 5, 5, 0])
    writer.add_rope_freq_base(1e6)


def _rule(shape: ModelShape) -> str | None:
    return (
        f"head_dim is {shape.head_dim}; it must be at least 32" if shape.head_dim < _INDEXER_WIDTH else None
    )


QWEN4EXP = Architecture(
    "qwen4exp",
    _tensors,
    _add_keys,
    layouts=frozenset({"split", "fused"}),
    rule=_rule,
    replays=False,  # its routers read a mix of several residual streams
)
