"""The calls that an engine's plugin makes on a bound manager."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from expertier.testing.tier_machine.model import I32
from expertier.testing.unlocked_calls import unlocked
from expertier.tiers.manager import TierManager


class EngineCalls(Protocol):
    """The calls of an engine that serves its threads from the residency tables.

    A call begins with `begin`. Where experts are missing, `fill` and `complete` follow, or `abort` when the fill
    failed. A call that was not aborted ends with `release`. One thread makes all of these calls.
    """

    def begin(self, layer: int, experts: I32) -> tuple[I32, I32] | None:
        """Pin distinct experts; return their slots and the indices of missing experts, or None where it would wait."""

    def fill(self, layer: int, experts: I32, slots: I32) -> None:
        """Bring the bytes of missing experts to their slots, or raise what `TierManager.engine.fill` raises."""

    def complete(self, layer: int, slots: I32) -> int:
        """Declare the slots' bytes complete; return how many slots were not complete before."""

    def abort(self, layer: int, slots: I32) -> None:
        """Undo a `begin` whose fill failed."""

    def release(self, layer: int, slots: I32) -> None:
        """Unpin the slots, whose reads are done."""


class TableEngine:
    """The calls as Python makes them, with the layers' locks held as the plugin holds them."""

    def __init__(self, tiers: TierManager) -> None:
        """Serve from `tiers`, which are bound."""
        self._tiers = tiers
        self._residency = tiers._residency
        self._locks = tiers._parts.locks

    def begin(self, layer: int, experts: I32) -> tuple[I32, I32] | None:
        """See `EngineCalls`."""
        slots, miss_index = np.full(len(experts), -1, np.int32), np.zeros(len(experts), np.int32)
        with self._locks.held(layer):
            n_missing = unlocked(self._residency).begin(layer, experts, slots, miss_index)
        return None if n_missing < 0 else (slots, miss_index[:n_missing].copy())

    def fill(self, layer: int, experts: I32, slots: I32) -> None:
        """See `EngineCalls`."""
        self._tiers.engine.fill(layer, experts, slots)

    def complete(self, layer: int, slots: I32) -> int:
        """See `EngineCalls`."""
        with self._locks.held(layer):
            n_filled = unlocked(self._residency).complete(layer, slots)
            self._locks.notify_all(layer)
        return n_filled

    def abort(self, layer: int, slots: I32) -> None:
        """See `EngineCalls`."""
        with self._locks.held(layer):
            status = unlocked(self._residency).abort(layer, slots)
            self._locks.notify_all(layer)
        assert status == 0, f"abort of slots {slots.tolist()} of layer {layer} was refused"

    def release(self, layer: int, slots: I32) -> None:
        """See `EngineCalls`."""
        with self._locks.held(layer):
            status = unlocked(self._residency).release(layer, slots)
            self._locks.notify_all(layer)
        assert status == 0, f"release of slots {slots.tolist()} of layer {layer} was refused"
