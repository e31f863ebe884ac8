"""Fills the slots that were chosen for missing experts, for leases, prefetches and engines."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from expertier.planner.policy.residency import Residency
from expertier.tiers.access.usage import Usage
from expertier.tiers.fill.filler import Filler
from expertier.tiers.host_pool.pool import HostPool
from expertier.tiers.slots.fences import SlotFences

I32 = npt.NDArray[np.int32]


class MissServer:
    """Fills slots, and tells the host pool which experts were evicted for that. Thread-safe."""

    def __init__(
        self, residency: Residency, pool: HostPool, filler: Filler, fences: SlotFences, usage: Usage
    ) -> None:
        """Connect the parts, to serve misses of the layers in `residency`."""
        self._residency = residency
        self._pool = pool
        self._filler = filler
        self._fences = fences
        self._usage = usage

    def serve(self, layer: int, experts: I32, slots: I32) -> None:
        """Fill `slots[i]` with `experts[i]`; the pool's copies of evicted experts become the most recently used."""
        self._pool.touch((layer, expert) for expert in self._residency.experts_evicted_by(layer, slots))
        self._filler.fill(layer, experts.tolist(), slots.tolist())

    def serve_lease(self, layer: int, experts: I32, slots: I32) -> None:
        """Fill the slots of a lease's missing experts, so that they can be made READY when this returns."""
        self.serve(layer, experts, slots)
        self.before_ready(layer, slots)

    def before_ready(self, layer: int, slots: I32) -> None:
        """While an engine is bound, wait until the bytes are in the slots, which are made READY next (I8).

        A bound engine reads READY slots at once, so queued copies must be done. Without an engine there is no need to
        wait here: a lease makes its stream wait for queued copies.
        """
        if self._usage.bound:
            self._fences.before_read(layer, slots.tolist(), None)
