"""Keeps tensor shards that were read for another device's miss until their own device asks for them."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import numpy.typing as npt

from expertier.tiers.split.split_table import ShardRef

Bytes = npt.NDArray[np.uint8]
Key = tuple[ShardRef, int]
"""A shard and the device that it is for."""


class WaitingShards:
    """At most `limit_bytes` of shards. Each is taken out once; the oldest shard is dropped first. Not thread-safe."""

    def __init__(self, limit_bytes: int) -> None:
        """Start empty."""
        self.limit_bytes = limit_bytes
        self.n_bytes = self.peak_bytes = 0
        self.taken = self.dropped = 0
        self._shards: OrderedDict[Key, Bytes] = OrderedDict()

    def __contains__(self, key: Key) -> bool:
        """Whether the shard waits here."""
        return key in self._shards

    def put(self, key: Key, shard: Bytes) -> None:
        """Add a shard, and drop the oldest shards to make room; a shard larger than the limit is dropped itself."""
        self._remove(key)
        if shard.nbytes > self.limit_bytes:
            self.dropped += 1
            return
        self._shards[key] = shard
        self.n_bytes += shard.nbytes
        while self.n_bytes > self.limit_bytes:
            self.n_bytes -= self._shards.popitem(last=False)[1].nbytes
            self.dropped += 1
        self.peak_bytes = max(self.peak_bytes, self.n_bytes)

    def take(self, key: Key) -> Bytes | None:
        """Remove the shard and return it; None where it does not wait here."""
        shard = self._remove(key)
        self.taken += shard is not None
        return shard

    def clear(self) -> None:
        """Drop all shards."""
        self._shards.clear()
        self.n_bytes = 0

    def check_valid(self) -> None:
        """Assert that the bytes are counted and within the limit."""
        assert self.n_bytes == sum(shard.nbytes for shard in self._shards.values())
        assert self.n_bytes <= self.limit_bytes
        assert self.peak_bytes <= self.limit_bytes

    def _remove(self, key: Key) -> Bytes | None:
        shard = self._shards.pop(key, None)
        if shard is not None:
            self.n_bytes -= shard.nbytes
        return shard
