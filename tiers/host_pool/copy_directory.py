"""Where the host pool's complete copies lie, for C++: a miss that L2 serves need not enter Python.

    address  int64[N]   where the copy begins, 0 where there is none
    readers  int32[N]   how many copies to the device read it now, or are queued to
    used     uint8[N]   whether it was read since the pool looked last
    hits     int64[1]   how often one was read

N counts the experts of all layers, layer by layer; `first` says where a layer's begin. All of it is read and
written under one lock (laid out as a layer's, `layer_locks.py`), by the engine's plugin for the time of a few
instructions. The order of locks: the pool's own comes first, this one is a leaf.

A copy with readers cannot be retracted, and what is retracted is found no more: so the pool retracts a copy
before it reuses or frees its block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from expertier.tiers.host_pool.block import ExpertKey
from expertier.tiers.shared.layer_locks import LayerLocks


@dataclass(frozen=True, slots=True)
class CopyAddresses:
    """Addresses of the arrays and of the lock, and the index of each layer's expert 0."""

    lock: int
    address: int
    readers: int
    used: int
    hits: int
    first: tuple[int, ...]


class CopyDirectory:
    """The arrays, and the pool's side of them. Thread-safe."""

    def __init__(self, n_experts: Sequence[int]) -> None:
        """Start empty, for layers of so many experts."""
        self._first = np.concatenate([[0], np.cumsum(n_experts)]).astype(np.int64).tolist()
        n = self._first[-1]
        self._address = np.zeros(n, np.int64)
        self._readers = np.zeros(n, np.int32)
        self._used = np.zeros(n, np.uint8)
        self._hits = np.zeros(1, np.int64)
        self._locks = LayerLocks(1)

    @property
    def addresses(self) -> CopyAddresses:
        """What C++ needs; valid while this object lives."""
        return CopyAddresses(
            self._locks.address,
            self._address.ctypes.data,
            self._readers.ctypes.data,
            self._used.ctypes.data,
            self._hits.ctypes.data,
            tuple(self._first[:-1]),
        )

    @property
    def hits(self) -> int:
        """How many copies were read."""
        return int(self._hits[0])

    def publish(self, key: ExpertKey, address: int) -> None:
        """Let an expert's copy be found: all its bytes are there."""
        index = self._index(key)
        with self._locks.held(0):
            self._address[index] = address
            self._used[index] = 0

    def retract(self, keys: Sequence[ExpertKey]) -> bool:
        """Have these copies found no more, and return True; False, and nothing changed, where one is read."""
        indices = [self._index(key) for key in keys]
        with self._locks.held(0):
            if self._readers[indices].any():
                return False
            self._address[indices] = 0
            return True

    def is_read(self, key: ExpertKey) -> bool:
        """Whether the copy is being read; it may be the next moment, in either case."""
        return bool(self._readers[self._index(key)])

    def take_used(self, key: ExpertKey) -> bool:
        """Return whether the copy was read since this was last asked."""
        index = self._index(key)
        if not self._used[index]:
            return False
        with self._locks.held(0):
            self._used[index] = 0
        return True

    def address_of(self, key: ExpertKey) -> int:
        """Return where the copy is said to be, 0 where there is none; for checks."""
        return int(self._address[self._index(key)])

    def n_published(self) -> int:
        """Return how many copies can be found."""
        return int(np.count_nonzero(self._address))

    def close(self) -> None:
        """Destroy the lock; nobody may use the directory any more."""
        self._locks.close()

    def _index(self, key: ExpertKey) -> int:
        layer, expert = key
        return int(self._first[layer] + expert)
