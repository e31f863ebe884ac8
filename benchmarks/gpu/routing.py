"""Which experts a benchmark's model picks at each step: as recorded, or made up with a real model's locality."""

from __future__ import annotations

from math import sqrt
from pathlib import Path

import numpy as np
import numpy.typing as npt

from expertier.engine_adapter.models.trace_ids import read_trace_ids

I32 = npt.NDArray[np.int32]

_KEPT = 0.3  # of an expert's momentary heat from one step to the next, as a correlation
_KEPT_TOPIC = 0.998  # ... of its heat under the topic
_TOPIC = 1.2  # the topic's weight against the moment's


def recorded_routing(path: Path, steps: int) -> I32:
    """Return the first steps of a recording (see `trace_ids`): int32 [steps, layers, top-k]."""
    return read_trace_ids(path, steps=steps)


def made_up_routing(*, steps: int, layers: int, experts: int, top_k: int, seed: int = 0) -> I32:
    """Return routing that no model did: int32 [steps, layers, top-k], the hottest first.

    Each expert's heat is a momentary part and a slowly drifting one, the topic. The three numbers above were chosen
    for the locality of 128 decode steps of Qwen3-30B-A3B (top-6 of 128, recorded by BigMoeOnEdge). Over as many
    steps: hits of an LRU of 16, 32 and 64 slots a layer after 20 steps 60, 82 and 95 %, recorded 59, 82 and 95 %;
    experts of a step that the step before used too 37 %, recorded 38 %.
    """
    random = np.random.default_rng([seed, steps, layers, experts])
    moment = random.standard_normal((layers, experts))
    topic = _TOPIC * random.standard_normal((layers, experts))
    ids = np.empty((steps, layers, top_k), np.int32)
    for step in range(steps):
        moment = _KEPT * moment + sqrt(1 - _KEPT**2) * random.standard_normal((layers, experts))
        topic = _KEPT_TOPIC * topic + sqrt(1 - _KEPT_TOPIC**2) * _TOPIC * random.standard_normal(
            (layers, experts)
        )
        ids[step] = np.argsort(-(moment + topic), axis=1)[:, :top_k]
    return ids
