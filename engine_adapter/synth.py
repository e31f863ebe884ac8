"""Random-weight MoE models that an engine really runs: for the demonstration, the self-checks and the tests.

The files are of llama.cpp's `qwen3moe` architecture, with a byte-level tokenizer: any text is a prompt.
They are deterministic in the shape (its seed included) and route with a skew as real models do. Control and
byte tokens never win greedily: a run goes on to the length that was asked for and prints readable nonsense.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod, sqrt
from pathlib import Path

import numpy as np
from gguf import (
    MODEL_ARCH,
    MODEL_ARCH_NAMES,
    MODEL_TENSOR,
    TENSOR_NAMES,
    GGUFWriter,
    LlamaFileType,
    TokenType,
)

from expertier.engine_adapter.model_shape import N_SPECIAL_TOKENS, ModelShape
from expertier.engine_adapter.synth_blocks import Bytes, WeightType, ggml_type, random_rows, row_bytes

__all__ = ["DEMO_SHAPE", "TINY_SHAPE", "ModelShape", "Progress", "write_model"]

Progress = Callable[[int, int], None]
"""Called with (bytes of weights written so far, bytes in all) after each tensor."""

DEMO_SHAPE = ModelShape(
    layers=12, experts=64, top_k=8, n_embd=768, n_ff=256, heads=12, kv_heads=4, head_dim=64, vocab=1024,
    seed=1, gate_up_type="Q4_K", down_type="Q6_K", dense_type="Q8_0",
)  # fmt: skip
"""The demonstration's model: about 300 MiB, 280 of them experts."""

TINY_SHAPE = ModelShape(
    layers=4, experts=16, top_k=4, n_embd=256, n_ff=256, heads=4, kv_heads=2, head_dim=64, vocab=512,
    seed=0, gate_up_type="Q4_K", down_type="Q6_K", dense_type="F32",
)  # fmt: skip
"""The tests' model: about 13 MiB, 8 of them experts."""

_CHUNK_WEIGHTS = 1 << 20  # drawn at a time, which bounds the memory beside the tensor's own


@dataclass(frozen=True, slots=True)
class _Tensor:
    """One tensor to write: its name, type, dimensions (in NumPy's order) and how to draw it."""

    name: str
    kind: WeightType
    dims: tuple[int, ...]
    std: float = 0.0  # 0: all ones, as norms are
    zero_rows: int = 0  # the first rows that are all zero
    row_skew: float = 0.0  # spread of the logarithm of the rows' scales

    @property
    def n_bytes(self) -> int:
        """Bytes of the tensor's data, without the file's padding."""
        return prod(self.dims[:-1]) * row_bytes(self.kind, self.dims[-1])

    def draw(self, rng: np.random.Generator) -> Bytes:
        """Draw the data: uint8[rows, bytes of a row]."""
        n_rows, n_cols = prod(self.dims[:-1]), self.dims[-1]
        if self.std == 0.0:
            return np.ones((n_rows, n_cols), np.float32).view(np.uint8)
        data = np.empty((n_rows, row_bytes(self.kind, n_cols)), np.uint8)
        step = max(1, _CHUNK_WEIGHTS // n_cols)
        for start in range(0, n_rows, step):
            stop = min(start + step, n_rows)
            data[start:stop] = random_rows(rng, self.kind, stop - start, n_cols, self.std)
        if self.row_skew:
            data.view(np.float32)[:] *= rng.lognormal(0.0, self.row_skew, (n_rows, 1)).astype(np.float32)
        data[: self.zero_rows] = 0
        return data


def write_model(path: str | os.PathLike[str], shape: ModelShape, progress: Progress | None = None) -> Path:
    """Write a model of `shape` to `path`, whole or not at all, and return the path.

    The data go to `path` + ".tmp", which is renamed when it is complete. One tensor at a time is in memory.
    The same shape gives the same bytes (with the same NumPy, whose generators may change between releases).
    Errors: OSError, when the file cannot be written; the partial file is removed.
    """
    target = Path(path)
    partial = target.with_name(target.name + ".tmp")
    tensors = list(_tensors(shape))
    total = sum(tensor.n_bytes for tensor in tensors)
    writer = GGUFWriter(partial, MODEL_ARCH_NAMES[MODEL_ARCH.QWEN3MOE])
    try:
        _add_metadata(writer, shape)
        _add_tokenizer(writer, shape.vocab)
        for tensor in tensors:
            element = np.dtype(np.float32)  # names no type: raw_dtype does
            writer.add_tensor_info(
                tensor.name, tensor.dims, element, tensor.n_bytes, raw_dtype=ggml_type(tensor.kind)
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        written = 0
        for index, tensor in enumerate(tensors):
            writer.write_tensor_data(tensor.draw(np.random.default_rng([shape.seed, index])))
            written += tensor.n_bytes
            if progress is not None:
                progress(written, total)
        writer.close()
        partial.replace(target)
    except BaseException:
        writer.close()
        partial.unlink(missing_ok=True)
        raise
    return target


def _tensors(shape: ModelShape) -> Iterator[_Tensor]:
    """List the model's tensors in the file's order; standard deviations keep activations near 1."""
    experts, embd, ff = shape.experts, shape.n_embd, shape.n_ff
    dense, attention, kv_rows = shape.dense_type, shape.attention_width, shape.kv_heads * shape.head_dim
    unit = 1 / sqrt(embd)

    def name(tensor: MODEL_TENSOR, block: int | None = None) -> str:
        return TENSOR_NAMES[tensor].format(bid=block) + ".weight"

    yield _Tensor(name(MODEL_TENSOR.TOKEN_EMBD), dense, (shape.vocab, embd), 1.0)
    yield _Tensor(name(MODEL_TENSOR.OUTPUT_NORM), "F32", (embd,))
    yield _Tensor(name(MODEL_TENSOR.OUTPUT), dense, (shape.vocab, embd), 3 * unit, zero_rows=N_SPECIAL_TOKENS)
    for block in range(shape.layers):
        yield _Tensor(name(MODEL_TENSOR.ATTN_NORM, block), "F32", (embd,))
        yield _Tensor(name(MODEL_TENSOR.ATTN_Q, block), dense, (attention, embd), unit)
        yield _Tensor(name(MODEL_TENSOR.ATTN_K, block), dense, (kv_rows, embd), unit)
        yield _Tensor(name(MODEL_TENSOR.ATTN_V, block), dense, (kv_rows, embd), unit)
        yield _Tensor(name(MODEL_TENSOR.ATTN_OUT, block), dense, (embd, attention), 1 / sqrt(attention))
        yield _Tensor(name(MODEL_TENSOR.ATTN_Q_NORM, block), "F32", (shape.head_dim,))
        yield _Tensor(name(MODEL_TENSOR.ATTN_K_NORM, block), "F32", (shape.head_dim,))
        yield _Tensor(name(MODEL_TENSOR.FFN_NORM, block), "F32", (embd,))
        yield _Tensor(
            name(MODEL_TENSOR.FFN_GATE_INP, block),
            "F32",
            (experts, embd),
            3 * unit,
            row_skew=shape.router_skew,
        )
        for matrix in (MODEL_TENSOR.FFN_GATE_EXP, MODEL_TENSOR.FFN_UP_EXP):
            yield _Tensor(name(matrix, block), shape.gate_up_type, (experts, ff, embd), unit)
        down = name(MODEL_TENSOR.FFN_DOWN_EXP, block)
        yield _Tensor(down, shape.down_type, (experts, embd, ff), 2 / sqrt(ff))


def _add_metadata(writer: GGUFWriter, shape: ModelShape) -> None:
    """Add the architecture's keys."""
    writer.add_name(f"random qwen3moe {shape.layers}x{shape.experts}, seed {shape.seed}")
    writer.add_description("Random weights, written by expertier: for trying and testing, it knows nothing.")
    writer.add_file_type(LlamaFileType.GUESSED)
    writer.add_quantization_version(2)
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.context_length)
    writer.add_embedding_length(shape.n_embd)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_expert_feed_forward_length(shape.n_ff)
    writer.add_expert_count(shape.experts)
    writer.add_expert_used_count(shape.top_k)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(shape.vocab)


def _add_tokenizer(writer: GGUFWriter, vocab: int) -> None:
    """Add a SentencePiece vocabulary: control tokens, one token a byte, then made-up words."""
    words = [f"\u2581{word}".encode() for word in _words(vocab - N_SPECIAL_TOKENS)]
    tokens = [b"<unk>", b"<s>", b"</s>", *(b"<0x%02X>" % byte for byte in range(256)), *words]
    control = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL]
    types = [*control, *[TokenType.BYTE] * 256, *[TokenType.NORMAL] * len(words)]
    scores = [0.0] * N_SPECIAL_TOKENS + [-float(rank) for rank in range(len(words))]
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types([int(kind) for kind in types])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)


def _words(count: int) -> list[str]:
    """Make `count` different words: the empty one (a bare space), then two or more syllables each."""
    syllables = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
    words = [""]
    for number in range(1, count):
        rest, word = number + len(syllables), ""
        while rest:
            rest, digit = divmod(rest, len(syllables))
            word += syllables[digit]
        words.append(word)
    return words
