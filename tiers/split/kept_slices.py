"""Slices of experts that were read for another device, until it asks for them."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import numpy.typing as npt

from expertier.tiers.split.split_table import SliceRef

Bytes = npt.NDArray[np.uint8]
Key = tuple[SliceRef, int]
"""A slice and the device that it is for."""


class KeptSlices:
    """At most `limit_bytes` of slices, each of which is taken out once; the oldest go first. Not thread-safe."""

    def __init__(self, limit_bytes: int) -> None:
        """Start empty."""
        self.limit_bytes = limit_bytes
        self.n_bytes = self.peak_bytes = 0
        self.taken = self.dropped = 0
        self._slices: OrderedDict[Key, Bytes] = OrderedDict()

    def __contains__(self, key: Key) -> bool:
        """Whether the slice is here."""
        return key in self._slices

    def put(self, key: Key, slice_: Bytes) -> None:
        """Keep a slice, and drop the oldest ones for it; one above the limit is not kept at all."""
        self._remove(key)
        if slice_.nbytes > self.limit_bytes:
            self.dropped += 1
            return
        self._slices[key] = slice_
        self.n_bytes += slice_.nbytes
        while self.n_bytes > self.limit_bytes:
            self.n_bytes -= self._slices.popitem(last=False)[1].nbytes
            self.dropped += 1
        self.peak_bytes = max(self.peak_bytes, self.n_bytes)

    def take(self, key: Key) -> Bytes | None:
        """Return the slice and forget it; None where it is not here."""
        slice_ = self._remove(key)
        self.taken += slice_ is not None
        return slice_

    def clear(self) -> None:
        """Forget all of them."""
        self._slices.clear()
        self.n_bytes = 0

    def check_valid(self) -> None:
        """Assert that the bytes are counted, and within the limit."""
        assert self.n_bytes == sum(slice_.nbytes for slice_ in self._slices.values())
        assert self.n_bytes <= self.limit_bytes
        assert self.peak_bytes <= self.limit_bytes

    def _remove(self, key: Key) -> Bytes | None:
        slice_ = self._slices.pop(key, None)
        if slice_ is not None:
            self.n_bytes -= slice_.nbytes
        return slice_
