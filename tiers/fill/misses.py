"""Brings the bytes of missing experts into the slots that were chosen for them: for leases, prefetches and engines."""

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
    """Fills slots, and keeps what they evicted in mind for the host pool. Thread-safe."""

    def __init__(
        self, residency: Residency, pool: HostPool, filler: Filler, fences: SlotFences, usage: Usage
    ) -> None:
        """Serve misses of the layers in `residency`."""
        self._residency = residency
        self._pool = pool
        self._filler = filler
        self._fences = fences
        self._usage = usage

    def serve(self, layer: int, experts: I32, slots: I32) -> None:
        """Fill the slots of missing experts; what they evicted becomes the youngest in the pool."""
        self._pool.touch((layer, expert) for expert in self._residency.experts_evicted_by(layer, slots))
        self._filler.fill(layer, experts.tolist(), slots.tolist())

    def serve_lease(self, layer: int, experts: I32, slots: I32) -> None:
        """Fill the slots of a lease's missing experts."""
        self.serve(layer, experts, slots)
        self.before_ready(layer, slots)

    def before_ready(self, layer: int, slots: I32) -> None:
        """Have the bytes in the slots before they count as READY, where an engine would believe that (I8).

        A lease has its stream wait for copies that are queued; an engine reads what is READY at once.
        """
        if self._usage.bound:
            self._fences.before_read(layer, slots.tolist(), None)
