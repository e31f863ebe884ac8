"""A model that replays recorded routing: at step t, each layer's router picks the experts of recorded step t.

It is a random model of a real architecture (`synth`) in which only these tensors are not random:

    token_embd       token FIRST_TOKEN + t holds the code of step t, `CODE_SCALE` times as large as what a layer
                     adds to the residual stream; so nothing that experts or attention add can pile up in it until
                     the routing changes. Special tokens hold the last step's code.
    ffn_gate_inp     each layer's router reads a code and scores the experts of its step highest (`trace_codes`);
                     biases of routers are 0
    output           after code t, token FIRST_TOKEN + t + 1 is the likeliest, and after the last code the first token:
                     an engine that decodes greedily replays the recording by itself, over and over

So an engine has the locality of the recorded model, without its weights. To drive it token by token, feed it
`trace_tokens`, and start again where the run is longer. The file's keys `expertier.trace.*` say what it replays.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path

import numpy as np
from gguf import MODEL_TENSOR, GGUFWriter

from expertier.engine_adapter.models.model_shape import N_SPECIAL_TOKENS, ModelShape
from expertier.engine_adapter.models.synth import Progress, model_tensors, write_tensors
from expertier.engine_adapter.models.synth_arch import ARCHITECTURES, Tensor, WritableTensor, common
from expertier.engine_adapter.models.synth_arch.given import GivenTensor, given_kind
from expertier.engine_adapter.models.synth_arch.repeated import repeat_experts
from expertier.engine_adapter.models.synth_blocks import WeightType, block_elements
from expertier.engine_adapter.models.trace_codes import F32, I32, TraceCodes, make_codes
from expertier.engine_adapter.models.trace_drift import make_drifting_codes
from expertier.errors import ConfigError

FIRST_TOKEN = N_SPECIAL_TOKENS
"""The token of step 0; the token of step t is FIRST_TOKEN + t."""

CODE_SCALE = 512.0
"""The codes' root mean square in the residual stream, to which a layer adds values of about 1."""

_NEXT_TOKEN_LOGIT = 20.0
_ROUTER = re.compile(r"blk\.\d+\.ffn_gate_inp\.weight")
_ROUTER_BIAS = re.compile(r"blk\.\d+\.(ffn_gate_inp|exp_probs_b)\.bias")


@dataclass(frozen=True, slots=True)
class TraceModel:
    """What was written: the file, its shape, and how the codes were made."""

    path: Path
    shape: ModelShape
    n_steps: int
    per_layer: bool


def trace_tokens(n_steps: int) -> list[int]:
    """Return the tokens that replay steps 0 to `n_steps` - 1."""
    return list(range(FIRST_TOKEN, FIRST_TOKEN + n_steps))


def trace_shape(ids: I32, shape: ModelShape) -> ModelShape:
    """Return `shape` with the layers, top-k, vocabulary and context that the recording asks for.

    `shape.experts` stays: a recording does not tell of experts that it never names. Raises ConfigError for an
    architecture whose routers do not read the code.
    """
    n_steps, n_layers, top_k = ids.shape
    architecture = ARCHITECTURES.get(shape.architecture)
    if architecture is not None and not architecture.replays:
        able = ", ".join(name for name, arch in ARCHITECTURES.items() if arch.replays)
        raise ConfigError(f"{shape.architecture} models cannot replay a recording; choose one of {able}")
    return replace(
        shape,
        layers=n_layers,
        top_k=top_k,
        vocab=FIRST_TOKEN + n_steps,
        context_length=max(shape.context_length, 2 * n_steps),
    )


def write_trace_model(
    path: str | os.PathLike[str],
    ids: I32,
    shape: ModelShape,
    *,
    repeat: bool = False,
    recall: float | None = None,
    recall_of_rare: float | None = None,
    progress: Progress | None = None,
) -> TraceModel:
    """Write a model that replays `ids` (int32 [steps, layers, top-k], see `trace_ids`), completely or not at all.

    `shape` gives the architecture, sizes and types; `trace_shape` fits it to the recording. With `repeat` the experts'
    rows repeat a block of 32 MiB, beginning at another place for each expert, so that a file is written as fast as the
    disk allows.
    With `recall`, a layer's router on the state of the layer before finds only that share of its experts, and
    `recall_of_rare` of the experts not used for a while (`trace_drift`); by default it finds all experts. The codes and
    a few MiB of weights are in memory at a time. Raises ConfigError for a shape that is impossible or cannot hold the
    recording, OSError when the file cannot be written.
    """
    shape = trace_shape(ids, shape)
    if recall is None:
        codes = make_codes(ids, shape.experts, shape.n_embd, shape.seed)
        start, attention = codes.codes, {}
    else:
        drifting = make_drifting_codes(ids, shape, recall, recall_of_rare)
        codes, start = drifting.codes, drifting.start
        attention = drifting.attention(_code_scale(start))
    drawn = list(model_tensors(shape))
    random: Sequence[Tensor | WritableTensor] = repeat_experts(drawn, shape.seed) if repeat else drawn
    tensors = _with_codes(random, codes, start, attention)

    def add_keys(writer: GGUFWriter) -> None:
        writer.add_uint32("expertier.trace.steps", len(ids))
        writer.add_uint32("expertier.trace.first_token", FIRST_TOKEN)

    written = write_tensors(path, shape, tensors, progress=progress, add_keys=add_keys)
    return TraceModel(written, shape, len(ids), codes.per_layer)


def default_width(n_layers: int, n_experts: int, kind: WeightType) -> int:
    """Return the least `n_embd` that holds any number of steps, in whole blocks of the weight type `kind`."""
    block = max(block_elements(kind), 64)
    return -(-n_layers * n_experts // block) * block


def _with_codes(
    random: Sequence[Tensor | WritableTensor],
    codes: TraceCodes,
    start: F32,
    attention: Mapping[str, Callable[[], F32]],
) -> list[WritableTensor]:
    """Replace the random tensors of the codes, routers and output, and those named in `attention`.

    `start` holds the codes as embeddings have them.
    """
    n_steps, n_embd = codes.codes.shape
    vocab = FIRST_TOKEN + n_steps
    embedding, output = common.name(MODEL_TENSOR.TOKEN_EMBD), common.name(MODEL_TENSOR.OUTPUT)
    tensors: list[WritableTensor] = []
    n_routers = 0
    for tensor in random:
        if tensor.name == embedding:
            tensors.append(GivenTensor(embedding, "F16", (vocab, n_embd), lambda: _embedding(start)))
        elif tensor.name == output:
            tensors.append(GivenTensor(output, "F16", (vocab, n_embd), lambda: _output(codes)))
        elif _ROUTER.fullmatch(tensor.name):
            tensors.append(GivenTensor(tensor.name, "F32", tensor.dims, _router_of(codes, n_routers)))
            n_routers += 1
        elif tensor.name in attention:
            assert isinstance(tensor, Tensor)
            tensors.append(
                GivenTensor(tensor.name, given_kind(tensor.kind), tensor.dims, attention[tensor.name])
            )
        elif _ROUTER_BIAS.fullmatch(tensor.name):
            tensors.append(Tensor(tensor.name, "F32", tensor.dims, fill=0.0))
        else:
            tensors.append(tensor)
    assert n_routers == codes.ids.shape[1], f"{n_routers} routers for {codes.ids.shape[1]} recorded layers"
    return tensors


def _router_of(codes: TraceCodes, layer: int) -> Callable[[], F32]:
    return lambda: codes.router(layer)


def _embedding(codes: F32) -> F32:
    special = np.broadcast_to(codes[-1], (FIRST_TOKEN, codes.shape[1]))
    return np.concatenate([special, codes]) * np.float32(_code_scale(codes))


def _code_scale(codes: F32) -> float:
    # With few experts among many coordinates a code has large values, which must stay below F16's 65504.
    return min(CODE_SCALE, 60000 / float(np.abs(codes).max()))


def _output(codes: TraceCodes) -> F32:
    n_embd = codes.codes.shape[1]
    special = np.zeros((FIRST_TOKEN, n_embd), np.float32)
    # The codes and the output of the last norm have the same norm, so a code scores highest at its own row.
    gain = _NEXT_TOKEN_LOGIT / sqrt(n_embd) / sqrt(n_embd)
    return np.concatenate([special, np.roll(codes.codes, 1, axis=0) * np.float32(gain)])
