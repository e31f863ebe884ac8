"""Codes for recorded steps: vectors that a layer's router turns back into the experts of that step.

A step's code is its token's embedding. The residual stream carries the code to each layer's router, which is a matrix;
attention and experts add only much smaller values. So the router has to give the recorded experts of step t the
largest scores for code t. There are two ways:

per layer    Each layer has `experts` coordinates of its own; code t is above 0 at the experts that the layer chose at
             step t, and the router reads these coordinates. This allows any number of steps, and needs
             layers * experts coordinates.
orthogonal   The codes are orthonormal, and the router's row of an expert is the sum of the codes of the steps that
             chose it. This allows any number of experts, and at most as many steps as coordinates.

The first of a step's recorded experts has the highest score. A little noise distinguishes steps that chose the same
experts in all layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import numpy as np
import numpy.typing as npt

from expertier.errors import ConfigError

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]

_RANK_STEP = 0.05  # the difference between the scores of two neighbouring ranks
_NOISE = 0.1  # the noise's share of a code, by norm
_LOGIT_GAP = 8.0  # about the gap between the experts of a step and all other experts


@dataclass(frozen=True, slots=True)
class TraceCodes:
    """Codes and routers of one recording. Codes have a root mean square of 1, as after a norm."""

    codes: F32  # [steps, n_embd]
    ids: I32  # [steps, layers, top-k]
    n_experts: int
    per_layer: bool

    def router(self, layer: int) -> F32:
        """Return the router's matrix of a layer: [experts, n_embd]."""
        n_steps, n_embd = self.codes.shape
        top_k = self.ids.shape[2]
        rows = np.zeros((self.n_experts, n_embd), np.float32)
        if self.per_layer:
            first = layer * self.n_experts
            gain = _LOGIT_GAP / sqrt(n_embd / (self.ids.shape[1] * top_k))
            rows[:, first : first + self.n_experts] = np.eye(self.n_experts, dtype=np.float32) * gain
            return rows
        scores = np.zeros((n_steps, self.n_experts), np.float32)
        np.put_along_axis(scores, self.ids[:, layer], rank_scores(top_k), axis=1)
        return (scores.T @ self.codes) * np.float32(_LOGIT_GAP / n_embd)


def make_codes(ids: I32, n_experts: int, n_embd: int, seed: int) -> TraceCodes:
    """Make the codes of recorded steps `ids` (int32 [steps, layers, top-k]) for a model `n_embd` wide.

    Raises ConfigError where neither way has room; it names the widths and the steps that would fit.
    """
    n_steps, n_layers, top_k = ids.shape
    most = int(ids.max())
    if most >= n_experts:
        raise ConfigError(
            f"the recording names expert {most}, but the model is to have {n_experts} experts: give more"
        )
    rng = np.random.default_rng([seed, n_steps])
    per_layer = n_layers * n_experts <= n_embd
    if per_layer:
        codes = np.zeros((n_steps, n_embd), np.float32)
        columns = ids + (np.arange(n_layers, dtype=np.int32) * n_experts)[None, :, None]
        scores = np.broadcast_to(rank_scores(top_k), ids.shape)
        np.put_along_axis(codes, columns.reshape(n_steps, -1), scores.reshape(n_steps, -1), axis=1)
        size = np.float32(_NOISE * sqrt(n_layers * top_k / n_embd))
        codes += np.where(rng.integers(0, 2, codes.shape, np.int8), size, -size)
    elif n_steps <= n_embd:
        # QR of a random square leaves every direction equally likely.
        codes = np.linalg.qr(rng.standard_normal((n_embd, n_steps)))[0].T.astype(np.float32)
    else:
        raise ConfigError(
            f"{n_steps} steps of {n_layers} layers with {n_experts} experts do not fit a model {n_embd} wide: "
            f"make n_embd at least {n_layers * n_experts} (then any number of steps fits), or take at most "
            f"{n_embd} steps"
        )
    codes *= np.float32(sqrt(n_embd)) / np.linalg.norm(codes, axis=1, keepdims=True)
    return TraceCodes(codes, ids, n_experts, per_layer)


def rank_scores(top_k: int) -> F32:
    """Scores of a step's experts, the first the highest and the last 1: [top-k]."""
    return (1 + _RANK_STEP * np.arange(top_k - 1, -1, -1)).astype(np.float32)
