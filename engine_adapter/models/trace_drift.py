"""Hidden states that change from layer to layer, so that only a part of a later layer's experts can be predicted.

In the plain codes of a recording (`trace_codes`) every layer has its coordinates, and they hold its experts from the
embedding on: a later layer's router, applied to an earlier layer's state, finds exactly the experts that will be used.
No real model is like that. Here a layer's coordinates hold a guess until that layer's own attention has corrected it:

    coordinates     embedding                        after the layer's attention
    of layer l      a guess: `recall` of the step's  the experts of the step
                    experts, other experts for the rest
    changes of l    experts less guess               the same
    signature       random signs, other ones for     the same
                    each step

Attention is made so that each token attends to itself alone: queries and keys are the same projection of the signature.
Its values are the layer's changes, which its output adds to the layer's coordinates. So the routing is exactly the
recording's, and a layer's router, applied to the state of any earlier layer, finds `recall` of its experts (in a real
model it finds fewer from farther away). The experts that it finds instead are drawn from the layer's other experts by
how often the layer uses them. Of experts that the layer has not used for a while it may find fewer, as in real models;
these are mostly the experts that a cache lacks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt

import numpy as np
from gguf import MODEL_TENSOR

from expertier.engine_adapter.models.model_shape import ModelShape
from expertier.engine_adapter.models.synth_arch import common
from expertier.engine_adapter.models.trace_codes import F32, I32, TraceCodes, rank_scores
from expertier.errors import ConfigError

ARCHITECTURE = "qwen3moe"
"""The only architecture that this works with: it norms queries and keys, which makes attention sharp enough."""

RARE_STEPS = 16
"""An expert that a layer has not used for so many steps is rare."""

_SIGNATURE = 0.5  # a coordinate's size, where a layer's coordinates have about 1 at each of its experts
_LEAST_SIGNATURE = 64  # coordinates: with fewer, tokens would be taken for one another
_SHARPNESS = 8.0  # the queries' norm


@dataclass(frozen=True, slots=True)
class DriftingCodes:
    """The codes at the end, the codes at the beginning, and the attention that turns the latter into the former."""

    codes: TraceCodes
    start: F32  # [steps, n_embd]
    shape: ModelShape

    def attention(self, scale: float) -> dict[str, Callable[[], F32]]:
        """Return what makes the values of the attention's tensors, by name; the residual stream is `scale` codes."""
        made: dict[str, Callable[[], F32]] = {}
        for block in range(self.shape.layers):
            made |= {
                common.name(MODEL_TENSOR.ATTN_Q, block): lambda: self._projection(self.shape.heads),
                common.name(MODEL_TENSOR.ATTN_K, block): lambda: self._projection(self.shape.kv_heads),
                common.name(MODEL_TENSOR.ATTN_V, block): lambda block=block: self._values(block),  # type: ignore[misc]
                common.name(MODEL_TENSOR.ATTN_OUT, block): lambda block=block: self._output(block, scale),  # type: ignore[misc]
                common.name(MODEL_TENSOR.ATTN_Q_NORM, block): self._sharpness,
            }
        return made

    def _sharpness(self) -> F32:
        return np.full(self.shape.head_dim, _SHARPNESS, np.float32)

    def _projection(self, heads: int) -> F32:
        """Return the same random signs of the signature for each head: [heads * head_dim, n_embd]."""
        shape = self.shape
        first = 2 * shape.layers * shape.experts
        one = np.zeros((shape.head_dim, shape.n_embd), np.float32)
        rng = np.random.default_rng(shape.seed)
        signs = rng.integers(0, 2, (shape.head_dim, shape.n_embd - first)) * 2 - 1
        one[:, first:] = signs / sqrt(shape.n_embd - first)
        return np.tile(one, (heads, 1))

    def _values(self, block: int) -> F32:
        """Return what reads the layer's changes: [kv_heads * head_dim, n_embd]."""
        shape = self.shape
        rows = np.zeros((shape.kv_heads * shape.head_dim, shape.n_embd), np.float32)
        experts = np.arange(shape.experts)
        rows[experts, (shape.layers + block) * shape.experts + experts] = 1
        return rows

    def _output(self, block: int, scale: float) -> F32:
        """Return the matrix that adds the values to the layer's coordinates: [n_embd, heads * head_dim]."""
        shape = self.shape
        rows = np.zeros((shape.n_embd, shape.attention_width), np.float32)
        experts = np.arange(shape.experts)
        # The first of the heads that share keys and values is used.
        of_head = experts // shape.head_dim * (shape.heads // shape.kv_heads)
        rows[block * shape.experts + experts, of_head * shape.head_dim + experts % shape.head_dim] = scale
        return rows


def make_drifting_codes(
    ids: I32, shape: ModelShape, recall: float, recall_of_rare: float | None = None
) -> DriftingCodes:
    """Make codes of recorded steps from which a share `recall` of a layer's experts can be predicted.

    `ids` are int32 [steps, layers, top-k]. For rare experts that share is `recall_of_rare`, by default `recall`. Raises
    ConfigError for a number that is not a share, an architecture other than ARCHITECTURE, and a shape without room.
    """
    n_steps, n_layers, top_k = ids.shape
    recalls = recall, recall if recall_of_rare is None else recall_of_rare
    _require_room(ids, shape, recalls)
    rng = np.random.default_rng([shape.seed, n_steps, int(recall * 1e6)])
    guesses = _guess(rng, ids, shape.experts, recalls)
    n_expert_coordinates = n_layers * shape.experts
    end = np.zeros((n_steps, shape.n_embd), np.float32)
    scores = np.broadcast_to(rank_scores(top_k), ids.shape).reshape(n_steps, -1)
    first = (np.arange(n_layers, dtype=np.int32) * shape.experts)[None, :, None]
    start = end.copy()
    np.put_along_axis(end, (ids + first).reshape(n_steps, -1), scores, axis=1)
    np.put_along_axis(start, (guesses + first).reshape(n_steps, -1), scores, axis=1)
    changes = end[:, :n_expert_coordinates] - start[:, :n_expert_coordinates]
    signature = (rng.integers(0, 2, (n_steps, shape.n_embd - 2 * n_expert_coordinates)) * 2 - 1) * np.float32(
        _SIGNATURE
    )
    for codes in (start, end):
        codes[:, n_expert_coordinates : 2 * n_expert_coordinates] = changes
        codes[:, 2 * n_expert_coordinates :] = signature
    size = np.float32(sqrt(shape.n_embd)) / np.linalg.norm(end, axis=1, keepdims=True)
    assert np.allclose(np.linalg.norm(start, axis=1), np.linalg.norm(end, axis=1)), (
        "a norm changes on the way"
    )
    return DriftingCodes(TraceCodes(end * size, ids, shape.experts, per_layer=True), start * size, shape)


def _guess(rng: np.random.Generator, ids: I32, n_experts: int, recalls: tuple[float, float]) -> I32:
    """Replace experts by experts that the step does not use; shares `recalls` of the usual and rare experts stay."""
    top_k = ids.shape[2]
    used = np.zeros((*ids.shape[:2], n_experts), np.bool_)
    np.put_along_axis(used, ids, True, axis=2)
    # The largest of these are a draw without replacement by how often experts are used; the step's own come last.
    draws = rng.gumbel(size=used.shape) + np.log(used.mean(axis=0) + 1e-3) - 1e3 * used
    others = np.argsort(-draws, axis=2)[:, :, :top_k].astype(np.int32)
    recent = np.zeros_like(used)
    for back in range(1, RARE_STEPS + 1):
        recent[back:] |= used[:-back]
    recalled = np.where(np.take_along_axis(recent, ids, axis=2), *recalls)
    guesses = np.where(rng.random(ids.shape) < recalled, ids, others)
    guesses[:, 0] = ids[:, 0]  # no layer comes before it
    return np.asarray(guesses, np.int32)


def _require_room(ids: I32, shape: ModelShape, recalls: tuple[float, float]) -> None:
    _, n_layers, top_k = ids.shape
    if not all(0 <= recall <= 1 for recall in recalls):
        raise ConfigError(f"asked for a recall of {recalls[0]} and {recalls[1]}: give shares from 0 to 1")
    if shape.architecture != ARCHITECTURE:
        raise ConfigError(
            f"asked for a {shape.architecture} model with a recall: only {ARCHITECTURE} models have one"
        )
    needed = 2 * n_layers * shape.experts + _LEAST_SIGNATURE
    if shape.n_embd < needed:
        raise ConfigError(
            f"{n_layers} layers of {shape.experts} experts with a recall need n_embd of at least {needed}; it is "
            f"{shape.n_embd}"
        )
    if 2 * top_k > shape.experts or shape.experts > shape.kv_heads * shape.head_dim:
        raise ConfigError(
            f"{shape.experts} experts, top-{top_k}, with a recall: give at least {2 * top_k} and at most kv_heads * "
            f"head_dim = {shape.kv_heads * shape.head_dim}"
        )
