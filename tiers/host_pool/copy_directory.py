"""Tells C++ where the host pool's complete copies lie, so that a miss that L2 serves need not enter Python.

    address  int64[N]   where the expert's copy begins; 0 where there is none
    readers  int32[N]   how many copies to the device read it now, or are queued to read it
    used     uint8[N]   whether it was read since the pool last asked
    hits     int64[1]   how many reads of copies there were in all

N is the number of experts of all layers, which are numbered layer by layer; `first` has each layer's first number. The
arrays are read and written under one lock, which is laid out as a layer's lock (`layer_locks.py`); the engine's plugin
holds it for a few instructions. A thread may take it while it holds the pool's lock, and takes no other lock after it.

The pool retracts a copy before it reuses or frees its block. A copy that has readers cannot be retracted, and a copy
that was retracted is found no more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from expertier.tiers.host_pool.block import ExpertKey
from expertier.tiers.shared.layer_locks import LayerLocks


@dataclass(frozen=True, slots=True)
class CopyAddresses:
    """The addresses of the lock and the arrays, and in `first` the index of each layer's expert 0."""

    lock: int
    address: int
    readers: int
    used: int
    hits: int
    first: tuple[int, ...]


class CopyDirectory:
    """Owns the arrays and does the host pool's part of the work with them. Thread-safe."""

    def __init__(self, n_experts: Sequence[int]) -> None:
        """Start empty, for layers with `n_experts[layer]` experts."""
        self._first = np.concatenate([[0], np.cumsum(n_experts)]).astype(np.int64).tolist()
        n = self._first[-1]
        self._address = np.zeros(n, np.int64)
        self._readers = np.zeros(n, np.int32)
        self._used = np.zeros(n, np.uint8)
        self._hits = np.zeros(1, np.int64)
        self._locks = LayerLocks(1)

    @property
    def addresses(self) -> CopyAddresses:
        """The addresses that C++ needs; valid while this object lives."""
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
        """How many reads of copies there were so far."""
        return int(self._hits[0])

    def publish(self, key: ExpertKey, address: int) -> None:
        """Let C++ find an expert's copy, all of whose bytes are there."""
        index = self._index(key)
        with self._locks.held(0):
            self._address[index] = address
            self._used[index] = 0

    def retract(self, keys: Sequence[ExpertKey]) -> bool:
        """Remove these copies from the directory and return True; change nothing and return False where one is read."""
        indices = [self._index(key) for key in keys]
        with self._locks.held(0):
            if self._readers[indices].any():
                return False
            self._address[indices] = 0
            return True

    def is_read(self, key: ExpertKey) -> bool:
        """Whether the copy is being read. It is only a hint: a read may begin or end at any moment."""
        return bool(self._readers[self._index(key)])

    def take_used(self, key: ExpertKey) -> bool:
        """Return whether the copy was read since the last call for it."""
        index = self._index(key)
        if not self._used[index]:
            return False
        with self._locks.held(0):
            self._used[index] = 0
        return True

    def address_of(self, key: ExpertKey) -> int:
        """Return the copy's address in the directory, 0 where there is none; for checks."""
        return int(self._address[self._index(key)])

    def n_published(self) -> int:
        """Return how many copies the directory has."""
        return int(np.count_nonzero(self._address))

    def close(self) -> None:
        """Destroy the lock; nobody may use the directory any more."""
        self._locks.close()

    def _index(self, key: ExpertKey) -> int:
        layer, expert = key
        return int(self._first[layer] + expert)
