"""Profiles taken from recorded routing: how often each expert is used, and how far apart its uses are."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from expertier.compiled_functions import cached_njit
from expertier.planner.traces.trace import Trace

I64 = npt.NDArray[np.int64]


def count_uses(trace: Trace) -> I64:
    """Return how many calls used each expert, [layers, most experts]: a warm start and a plan use these counts."""
    most = int(trace.n_experts.max())
    key = np.repeat(trace.layer.astype(np.int64), trace.lengths) * most + trace.experts
    return np.bincount(key, minlength=trace.n_layers * most).reshape(trace.n_layers, most).astype(np.int64)


def reuse_distances(trace: Trace) -> I64:
    """Return how far apart the uses of an expert are, [layers, most experts + 1].

    Entry [layer, d] counts the look-ups of an expert that was used before in the same sequence, with `d` other experts
    of the layer used in between. The last entry counts the first uses in a sequence. An LRU of n slots a layer, which
    starts each sequence empty and takes the experts one by one as recorded, hits the sum of the first n entries.
    """
    most = int(trace.n_experts.max())
    found = np.zeros((trace.n_layers, most + 1), np.int64)
    _loop()(trace.layer, trace.bounds, trace.experts, trace.sequences, found)
    return found


@cache
def _loop() -> Any:
    @cached_njit()
    def loop(layer: Any, bounds: Any, experts: Any, sequences: Any, found: Any) -> None:
        most = found.shape[1] - 1
        recent = np.empty((found.shape[0], most), np.int32)  # a layer's experts, the last used one first
        n_seen = np.zeros(found.shape[0], np.int64)
        for sequence in range(len(sequences) - 1):
            n_seen[:] = 0
            for call in range(sequences[sequence], sequences[sequence + 1]):
                of = layer[call]
                for i in range(bounds[call], bounds[call + 1]):
                    expert, distance = experts[i], 0
                    while distance < n_seen[of] and recent[of, distance] != expert:
                        distance += 1
                    if distance < n_seen[of]:
                        found[of, distance] += 1
                    else:
                        found[of, most] += 1
                        n_seen[of] += 1
                    for place in range(distance, 0, -1):
                        recent[of, place] = recent[of, place - 1]
                    recent[of, 0] = expert

    return loop
