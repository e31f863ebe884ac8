"""The tensors that most architectures share. Standard deviations keep the activations near 1."""

from __future__ import annotations

from collections.abc import Iterator
from math import sqrt

from gguf import MODEL_TENSOR, TENSOR_NAMES, GGUFWriter

from expertier.engine_adapter.models.model_shape import N_SPECIAL_TOKENS, ModelShape
from expertier.engine_adapter.models.synth_arch.tensor import Tensor
from expertier.engine_adapter.models.synth_blocks import WeightType

BIAS_STD = 0.1


def name(tensor: MODEL_TENSOR, block: int | None = None, suffix: str = "weight") -> str:
    """Return a tensor's name in a file."""
    return f"{TENSOR_NAMES[tensor].format(bid=block)}.{suffix}"


def head(shape: ModelShape, embedding_std: float = 1.0) -> Iterator[Tensor]:
    """Yield the embedding, the last norm and the output matrix."""
    yield Tensor(name(MODEL_TENSOR.TOKEN_EMBD), shape.dense_type, (shape.vocab, shape.n_embd), embedding_std)
    yield norm(MODEL_TENSOR.OUTPUT_NORM, shape.n_embd)
    yield output(shape)


def output(shape: ModelShape) -> Tensor:
    """Return the output matrix, in which special tokens have no logit."""
    dims, std = (shape.vocab, shape.n_embd), 3 / sqrt(shape.n_embd)
    return Tensor(name(MODEL_TENSOR.OUTPUT), shape.dense_type, dims, std, zero_rows=N_SPECIAL_TOKENS)


def norm(tensor: MODEL_TENSOR, width: int, block: int | None = None) -> Tensor:
    """Return a norm's factors, all one."""
    return Tensor(name(tensor, block), "F32", (width,))


def bias(tensor: MODEL_TENSOR, block: int, *dims: int, std: float = BIAS_STD) -> Tensor:
    """Return biases: of a whole layer, or of each expert."""
    return Tensor(name(tensor, block, "bias"), "F32", dims, std)


def matrix(tensor: MODEL_TENSOR, block: int | None, kind: WeightType, rows: int, cols: int) -> Tensor:
    """Return a matrix that keeps its input's spread."""
    return Tensor(name(tensor, block), kind, (rows, cols), 1 / sqrt(cols))


def qkv(shape: ModelShape, block: int, biases: bool = False) -> Iterator[Tensor]:
    """Yield the matrices of the queries, keys and values, and their biases."""
    kv_rows = shape.kv_heads * shape.head_dim
    rows_of = {
        MODEL_TENSOR.ATTN_Q: shape.attention_width,
        MODEL_TENSOR.ATTN_K: kv_rows,
        MODEL_TENSOR.ATTN_V: kv_rows,
    }
    for tensor, rows in rows_of.items():
        yield matrix(tensor, block, shape.dense_type, rows, shape.n_embd)
        if biases:
            yield bias(tensor, block, rows)


def attention(shape: ModelShape, block: int, biases: bool = False) -> Iterator[Tensor]:
    """Yield the four matrices of attention, with biases of the first three where asked for."""
    yield from qkv(shape, block, biases)
    yield matrix(MODEL_TENSOR.ATTN_OUT, block, shape.dense_type, shape.n_embd, shape.attention_width)


def router(shape: ModelShape, block: int) -> Tensor:
    """Return the router's matrix, with popular experts as the shape asks for."""
    dims = (shape.experts, shape.n_embd)
    std = 3 / sqrt(shape.n_embd)
    return Tensor(name(MODEL_TENSOR.FFN_GATE_INP, block), "F32", dims, std, row_skew=shape.router_skew)


def experts(shape: ModelShape, block: int, layer: int) -> Iterator[Tensor]:
    """Yield the expert tensors of MoE layer `layer`, which is block `block`, in the shape's layout."""
    gate_up, down = shape.expert_types(layer)
    n_experts, embd, ff = shape.experts, shape.n_embd, shape.n_ff_of(layer)
    matrices = {
        "split": ((MODEL_TENSOR.FFN_GATE_EXP, ff), (MODEL_TENSOR.FFN_UP_EXP, ff)),
        "fused": ((MODEL_TENSOR.FFN_GATE_UP_EXP, 2 * ff),),
        "no gate": ((MODEL_TENSOR.FFN_UP_EXP, ff),),
    }
    for tensor, rows in matrices[shape.expert_layout]:
        yield Tensor(name(tensor, block), gate_up, (n_experts, rows, embd), 1 / sqrt(embd))
    yield Tensor(name(MODEL_TENSOR.FFN_DOWN_EXP, block), down, (n_experts, embd, ff), 2 / sqrt(ff))


def dense(shape: ModelShape, block: int, width: int) -> Iterator[Tensor]:
    """Yield a dense feed-forward network `width` wide."""
    yield matrix(MODEL_TENSOR.FFN_GATE, block, shape.dense_type, width, shape.n_embd)
    yield matrix(MODEL_TENSOR.FFN_UP, block, shape.dense_type, width, shape.n_embd)
    yield matrix(MODEL_TENSOR.FFN_DOWN, block, shape.dense_type, shape.n_embd, width)


def shared_expert(shape: ModelShape, block: int) -> Iterator[Tensor]:
    """Yield the expert that every token uses, as wide as a routed expert; to the engine it is a dense network."""
    yield matrix(MODEL_TENSOR.FFN_GATE_SHEXP, block, shape.dense_type, shape.n_ff, shape.n_embd)
    yield matrix(MODEL_TENSOR.FFN_UP_SHEXP, block, shape.dense_type, shape.n_ff, shape.n_embd)
    yield matrix(MODEL_TENSOR.FFN_DOWN_SHEXP, block, shape.dense_type, shape.n_embd, shape.n_ff)


def dense_width(shape: ModelShape) -> int:
    """Width of the dense feed-forward networks, where an architecture has some."""
    return 2 * shape.n_ff


def add_heads(writer: GGUFWriter, shape: ModelShape) -> None:
    """Add the keys of plain attention: heads and their width."""
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
