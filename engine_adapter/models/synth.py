"""Random-weight MoE models that an engine can run: for the demonstration, the self-checks and the tests.

The files are of one of llama.cpp's architectures (`synth_arch`), with a byte-level tokenizer: any text is a prompt.
The same shape (its seed included) always gives the same file, and routing is skewed as in real models. Greedy decoding
never picks control or byte tokens: a run goes on to the length that was asked for and prints readable nonsense.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from gguf import GGUFWriter, LlamaFileType, TokenType

from expertier.atomic_file import writing_atomically
from expertier.engine_adapter.models.model_shape import N_SPECIAL_TOKENS, ModelShape
from expertier.engine_adapter.models.synth_arch import ARCHITECTURES, Tensor, WritableTensor
from expertier.engine_adapter.models.synth_blocks import block_elements, ggml_type
from expertier.errors import ConfigError
from expertier.units import round_up

__all__ = [
    "DEMO_SHAPE",
    "TINY_SHAPE",
    "ModelShape",
    "Progress",
    "model_tensors",
    "write_model",
    "write_tensors",
]

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


def write_model(
    path: str | os.PathLike[str], shape: ModelShape, progress: Progress | None = None, *, holes: bool = False
) -> Path:
    """Write a model of `shape` to `path`, completely or not at all, and return the path.

    The data go to a temporary file, which is renamed when it is complete. A few MiB are in memory at a time.
    The same shape gives the same bytes (with the same NumPy, whose generators may change between releases). With
    `holes` the weights are left out, as holes of the file: a model of any size to plan with, in a few MiB of disk.
    Errors: ConfigError, when the architecture cannot have this shape. OSError, when the file cannot be
    written; the partial file is removed.
    """
    return write_tensors(path, shape, model_tensors(shape), progress=progress, holes=holes)


def write_tensors(
    path: str | os.PathLike[str],
    shape: ModelShape,
    tensors: Sequence[WritableTensor],
    *,
    progress: Progress | None = None,
    add_keys: Callable[[GGUFWriter], None] | None = None,
    holes: bool = False,
) -> Path:
    """Write a model of `shape` from `tensors`, which are those of `model_tensors` or replace them.

    It works as `write_model` does; a few MiB are in memory at a time. `add_keys` adds keys to the file's head.
    """
    with writing_atomically(path, durable=False) as partial:
        _write(partial, shape, tensors, progress, add_keys, holes=holes)
    return Path(path)


def _write(
    partial: Path,
    shape: ModelShape,
    tensors: Sequence[WritableTensor],
    progress: Progress | None,
    add_keys: Callable[[GGUFWriter], None] | None,
    *,
    holes: bool,
) -> None:
    writer = GGUFWriter(partial, shape.architecture)
    try:
        _add_metadata(writer, shape)
        ARCHITECTURES[shape.architecture].add_keys(writer, shape)
        if add_keys is not None:
            add_keys(writer)
        _add_tokenizer(writer, shape.vocab)
        for tensor in tensors:
            element = np.dtype(np.float32)  # a placeholder: raw_dtype gives the type
            writer.add_tensor_info(
                tensor.name, tensor.dims, element, tensor.n_bytes, raw_dtype=ggml_type(tensor.kind)
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        if holes:
            _leave_holes(writer, tensors)
        else:
            _write_data(writer, shape.seed, tensors, progress)
        writer.close()
    except BaseException:
        with suppress(OSError):  # closing writes what is buffered; the first error says why that fails
            writer.close()
        raise


def _write_data(
    writer: GGUFWriter, seed: int, tensors: Sequence[WritableTensor], progress: Progress | None
) -> None:
    """Write the tensors' data in chunks, as the gguf package's own call would need a full tensor in memory."""
    assert writer.fout is not None
    file = writer.fout[0]
    total = sum(tensor.n_bytes for tensor in tensors)
    written = 0
    for index, tensor in enumerate(tensors):
        writer.write_padding(file, file.tell())
        n_bytes = 0
        for chunk in tensor.chunks(np.random.default_rng([seed, index])):
            file.write(chunk.data)  # NumPy's own `tofile` does not report the file's error
            n_bytes += chunk.nbytes
        assert n_bytes == tensor.n_bytes, f"{tensor.name}: {n_bytes} bytes for {tensor.n_bytes}"
        writer.write_padding(file, n_bytes)
        written += n_bytes
        if progress is not None:
            progress(written, total)


def _leave_holes(writer: GGUFWriter, tensors: Sequence[WritableTensor]) -> None:
    """Make the file as long as with the tensors' data."""
    assert writer.fout is not None
    file = writer.fout[0]
    writer.write_padding(file, file.tell())
    align = writer.data_alignment
    file.truncate(file.tell() + sum(round_up(tensor.n_bytes, align) for tensor in tensors))


def model_tensors(shape: ModelShape) -> Sequence[Tensor]:
    """List the tensors of a model of `shape`, in the file's order.

    Errors: ConfigError, when the architecture cannot have this shape.
    """
    architecture = ARCHITECTURES.get(shape.architecture)
    if architecture is None:
        raise ConfigError(
            f"no models of the architecture {shape.architecture!r} can be made; known are {', '.join(ARCHITECTURES)}"
        )
    architecture.check(shape)
    tensors = list(architecture.tensors(shape))
    for tensor in tensors:
        block = block_elements(tensor.kind)
        if tensor.dims[-1] % block:
            raise ConfigError(
                f"no engine can run this model shape as {shape.architecture}: the rows of {tensor.name} have "
                f"{tensor.dims[-1]} weights; {tensor.kind} needs a multiple of {block}"
            )
    return tensors


def _add_metadata(writer: GGUFWriter, shape: ModelShape) -> None:
    """Add the keys that all architectures have."""
    writer.add_name(f"random {shape.architecture} {shape.layers}x{shape.experts}, seed {shape.seed}")
    writer.add_description("Random weights, written by expertier: for trying and testing, it knows nothing.")
    writer.add_file_type(LlamaFileType.GUESSED)
    writer.add_quantization_version(2)
    writer.add_context_length(shape.context_length)
    writer.add_embedding_length(shape.n_embd)
    writer.add_expert_count(shape.experts)
    if (
        not shape.layer_top_k
    ):  # otherwise the architecture adds the counts, because only it knows which block is which layer
        writer.add_expert_used_count(shape.top_k)
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
