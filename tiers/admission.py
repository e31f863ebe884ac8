"""The transaction that brings experts into slots."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from expertier.errors import BusyError
from expertier.planner.outcome import Outcome
from expertier.planner.residency import Residency
from expertier.tiers.layer_locks import LayerLocks

I32 = npt.NDArray[np.int32]
Fill = Callable[[int, I32, I32], None]


class Admission:
    """Takes and drops slots: the policy's calls under the layers' locks, with fills between them.

        begin ──► all there ────────────────────────────► taken
          ├─────► some missing ──► fill ──► complete ──► taken
          │                          └─ fails ──► abort ──► as before, what the misses evicted stays evicted
          └─────► BUSY ──► wait, and again; or BusyError

    An engine's C++ threads make the same calls with the same locks. Thread-safe.
    """

    def __init__(self, residency: Residency, locks: LayerLocks, fill: Fill) -> None:
        """`fill(layer, experts, slots)` puts the bytes in place or raises; it is called with no lock held."""
        self._residency = residency
        self._locks = locks
        self._fill = fill

    def take_hits(self, layer: int, experts: I32) -> I32 | None:
        """Return the slots of distinct `experts`, at least one, pinned, if they are all there; otherwise None.

        The usual case, in one compiled call. None also where `experts` are not the layer's; nothing has
        changed then.
        """
        slots = np.empty(len(experts), np.int32)
        slots[0] = -1
        try:
            status = self._residency.take_hits(self._locks.address, layer, experts, slots)
        except BaseException:
            self._undo(layer, slots)
            raise
        return slots if status == 0 else None

    def take(self, layer: int, experts: I32, may_wait: Callable[[], bool]) -> I32:
        """Return the slots of distinct `experts`, pinned and READY.

        Waits while others hold what is needed, as long as the caller holds nothing itself (`may_wait`):
        whoever holds slots and waits for more can be waited for in turn. Where it must not wait it raises
        `BusyError`. A wait for a fill to end is always safe, as fills ask for nothing that a lease holds:
        the expert may be this call's, or the slot a prefetch's that is unpinned then.

        Whatever is raised, nothing stays pinned or half filled.
        """
        slots = np.full(len(experts), -1, np.int32)
        try:
            missing = self._begin(layer, experts, slots, may_wait)
            if len(missing):
                self._fill(layer, experts[missing], slots[missing])
                with self._locks.held(layer):
                    self._residency.complete(layer, slots)
                    self._locks.notify_all(layer)
        except BaseException:
            self._undo(layer, slots)
            raise
        return slots

    def drop(self, layer: int, slots: I32) -> None:
        """Unpin slots that `take` or `take_hits` returned."""
        if self._residency.give_back(self._locks.address, layer, slots) == 0:
            return
        with self._locks.held(layer):
            status = self._residency.release(layer, slots)
            self._locks.notify_all(layer)
        assert status == 0, f"layer {layer}: slots {slots.tolist()} were not all pinned"

    def resident_first(self, layer: int, experts: I32) -> None:
        """Reorder `experts` in place, those in slots first."""
        with self._locks.held(layer):
            self._residency.resident_first(layer, experts)

    def _begin(self, layer: int, experts: I32, slots: I32, may_wait: Callable[[], bool]) -> I32:
        """Pin the experts' slots; return the indices of the missing ones."""
        miss_index = np.empty(len(experts), np.int32)
        waiting = False
        while True:
            with self._locks.held(layer):
                status = self._residency.begin(layer, experts, slots, miss_index)
                while status == Outcome.BUSY and (waiting or self._any_filling(layer)):
                    self._locks.wait(layer)
                    status = self._residency.begin(layer, experts, slots, miss_index)
            if status >= 0:
                return miss_index[:status]
            assert status == Outcome.BUSY, (
                f"layer {layer}: {Outcome(status)!r} for experts {experts.tolist()}"
            )
            if not may_wait():
                n_slots = int(self._residency.n_slots[layer])
                raise BusyError(
                    f"asked for {len(experts)} experts of layer {layer}: too few of its {n_slots} slots are "
                    "unpinned, and this thread holds leases, so it must not wait: release one, or acquire "
                    "fewer experts"
                )
            waiting = True

    def _any_filling(self, layer: int) -> bool:
        """Whether a slot of the layer is being filled; the caller holds its lock."""
        low = self._residency.first[layer]
        high = low + self._residency.n_slots[layer]
        filling = (self._residency.owner[low:high] >= 0) & ~self._residency.ready[low:high]
        return bool(filling.any())

    def _undo(self, layer: int, slots: I32) -> None:
        """Take back a `begin` that had been applied; `slots` tells, as it is written by nothing else."""
        if len(slots) and slots[0] >= 0:
            with self._locks.held(layer):
                self._residency.abort(layer, slots)
                self._locks.notify_all(layer)
