"""Least recently used first out, in bytes, as compiled functions: L2 under L1, and one LRU over all layers.

A key is layer * most experts + expert. The list is circular and its last index stands for both ends, so that nothing
has to ask whether a neighbour is there.
"""

from __future__ import annotations

import zlib
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from expertier.planner.tables import I32, I64, compiled, source_stamp

LIMIT, USED, EVICTED = range(3)
"""Entries of `state`: the budget in bytes, how much is used, and how many have left to make room."""

ABSENT = -1


class Recency(NamedTuple):
    """The list's arrays."""

    older: I32
    newer: I32
    sizes: I64
    """[L] bytes of an expert of each layer."""
    state: I64


def make_recency(sizes: I64, most_experts: int, limit_bytes: int) -> Recency:
    """Return an empty list of experts of `sizes` [L] bytes under a budget."""
    n_keys = len(sizes) * most_experts
    ends = np.full((2, n_keys + 1), ABSENT, np.int32)
    ends[:, n_keys] = n_keys
    return Recency(ends[0], ends[1], sizes, np.array([limit_bytes, 0, 0], np.int64))


@compiled
def _take_out(recency: Recency, key: int) -> None:
    older, newer = recency.older[key], recency.newer[key]
    recency.newer[older] = newer
    recency.older[newer] = older


@compiled
def _put_in(recency: Recency, key: int) -> None:
    end = len(recency.older) - 1
    newest = recency.older[end]
    recency.newer[newest] = key
    recency.older[key] = newest
    recency.newer[key] = end
    recency.older[end] = key


@compiled
def refresh(recency: Recency, key: int) -> bool:
    """Make a key the newest if it is there; returns whether it is."""
    if recency.older[key] == ABSENT:
        return False
    _take_out(recency, key)
    _put_in(recency, key)
    return True


@compiled
def evict_for(recency: Recency, n_bytes: int) -> int:
    """Take the oldest out if `n_bytes` more do not fit; returns its key, or ABSENT if they fit already."""
    if recency.state[USED] + n_bytes <= recency.state[LIMIT]:
        return ABSENT
    oldest = int(recency.newer[len(recency.newer) - 1])
    _take_out(recency, oldest)
    recency.older[oldest] = ABSENT
    most_experts = (len(recency.older) - 1) // len(recency.sizes)
    recency.state[USED] -= recency.sizes[oldest // most_experts]
    recency.state[EVICTED] += 1
    return oldest


@compiled
def insert(recency: Recency, layer: int, key: int) -> None:
    """Put in a key that is not there, and for which there is room."""
    recency.state[USED] += recency.sizes[layer]
    _put_in(recency, key)


@compiled
def serve(recency: Recency, layer: int, key: int) -> bool:
    """Look a key up and keep it from now on, if it fits at all; returns whether it was there."""
    if refresh(recency, key):
        return True
    if recency.sizes[layer] <= recency.state[LIMIT]:
        while evict_for(recency, recency.sizes[layer]) != ABSENT:
            pass
        insert(recency, layer, key)
    return False


@cache
def replay_stamp() -> int:
    """Return a number that changes with the source of any replay loop: part of their keys in Numba's cache."""
    here = Path(__file__).parent
    own = [*sorted(here.glob("replay*.py")), here / "belady.py"]
    return zlib.crc32(b"".join(path.read_bytes() for path in own), source_stamp()) | 1
