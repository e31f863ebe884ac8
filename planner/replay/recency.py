"""An LRU list with a budget in bytes, as compiled functions: L2 under L1, or one LRU over all layers.

A key is layer * most experts + expert. The list is circular, and its last node stands for both ends, so that every key
has two neighbours.

A replay loop passes the address of a list's directory and not the arrays: Numba passes seven numbers for an array, and
counts references to it, which took longer than the work on the list.
"""

from __future__ import annotations

import zlib
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from expertier.planner.policy.tables import I32, I64, array_at, compiled, source_stamp

LIMIT, USED, EVICTED, MOST_EXPERTS = range(4)
"""Entries of `state`: the budget in bytes, the bytes in use, the number of evictions, the most experts of a layer."""

ABSENT = -1

_OLDER, _NEWER = range(2)
_KEY_MASK = (1 << 31) - 1  # changes no key; tells the compiler that it is no negative index

# A directory's numbers: addresses, and how many keys there are.
_N_KEYS, _LINKS, _SIZES, _STATE = range(4)
_DIRECTORY = 4


class Recency(NamedTuple):
    """The list's arrays; n keys."""

    links: I32
    """[2 * (n + 1)] for each key: the next older key (ABSENT where the key is not in the list), the next newer key."""
    sizes: I64
    """[n] bytes of each key's expert."""
    state: I64
    """[4]"""
    directory: I64
    """[4] the number of keys, and the addresses of the arrays."""


def make_recency(layer_sizes: I64, most_experts: int, limit_bytes: int) -> Recency:
    """Return an empty list of experts of `layer_sizes` [L] bytes under a budget."""
    sizes = np.repeat(layer_sizes.astype(np.int64), most_experts)
    links = np.full(2 * (len(sizes) + 1), ABSENT, np.int32)
    links[-2:] = len(sizes)
    state = np.array([limit_bytes, 0, 0, most_experts], np.int64)
    directory = np.array(
        [len(sizes), links.ctypes.data, sizes.ctypes.data, state.ctypes.data],
        np.int64,
    )
    return Recency(links, sizes, state, directory)


@compiled
def recency_at(directory: int) -> Recency:
    """Return the arrays of the directory at an address, shared and not copied."""
    row = array_at(directory, _DIRECTORY, np.int64)
    n = row[_N_KEYS]
    return Recency(
        array_at(row[_LINKS], 2 * (n + 1), np.int32),
        array_at(row[_SIZES], n, np.int64),
        array_at(row[_STATE], 4, np.int64),
        row,
    )


@compiled
def _take_out(recency: Recency, key: int) -> None:
    older = recency.links[2 * key + _OLDER] & _KEY_MASK
    newer = recency.links[2 * key + _NEWER] & _KEY_MASK
    recency.links[2 * older + _NEWER] = newer
    recency.links[2 * newer + _OLDER] = older


@compiled
def _put_in(recency: Recency, key: int) -> None:
    end = len(recency.sizes)
    newest = recency.links[2 * end + _OLDER] & _KEY_MASK
    recency.links[2 * newest + _NEWER] = key
    recency.links[2 * key + _OLDER] = newest
    recency.links[2 * key + _NEWER] = end
    recency.links[2 * end + _OLDER] = key


@compiled
def touch(recency: Recency, key: int) -> bool:
    """Make a key the newest if it is in the list; return whether it is."""
    if recency.links[2 * (key & _KEY_MASK) + _OLDER] == ABSENT:
        return False
    _take_out(recency, key & _KEY_MASK)
    _put_in(recency, key & _KEY_MASK)
    return True


@compiled
def evict_for(recency: Recency, n_bytes: int) -> int:
    """Evict the oldest key if `n_bytes` more do not fit; return that key, or ABSENT if the bytes fit."""
    if recency.state[USED] + n_bytes <= recency.state[LIMIT]:
        return ABSENT
    oldest = recency.links[2 * len(recency.sizes) + _NEWER] & _KEY_MASK
    _take_out(recency, oldest)
    recency.links[2 * oldest + _OLDER] = ABSENT
    recency.state[USED] -= recency.sizes[oldest]
    recency.state[EVICTED] += 1
    return int(oldest)


@compiled
def insert(recency: Recency, key: int) -> None:
    """Insert a key that is not in the list and that fits into the budget."""
    recency.state[USED] += recency.sizes[key & _KEY_MASK]
    _put_in(recency, key & _KEY_MASK)


@compiled
def serve(recency: Recency, key: int) -> bool:
    """Look a key up, and insert it where it is missing and fits into an empty list; return whether it was there."""
    if touch(recency, key):
        return True
    size = recency.sizes[key & _KEY_MASK]
    if size <= recency.state[LIMIT]:
        while evict_for(recency, size) != ABSENT:
            pass
        insert(recency, key)
    return False


@cache
def replay_stamp() -> int:
    """Return a number that changes with the source of any replay loop: part of their keys in Numba's cache."""
    here = Path(__file__).parent
    return zlib.crc32(b"".join(path.read_bytes() for path in sorted(here.glob("*.py"))), source_stamp()) | 1
