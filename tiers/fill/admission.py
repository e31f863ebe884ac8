"""The transaction that brings experts into slots."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from expertier.errors import BusyError
from expertier.interrupts import raise_pending
from expertier.planner.policy.outcome import Outcome
from expertier.planner.policy.residency import Residency
from expertier.tiers.shared.layer_locks import LayerLocks, wait_deadline

I32 = npt.NDArray[np.int32]
Fill = Callable[[int, I32, I32], None]


class Admission:
    """Acquires and releases slots: the policy's calls under the layers' locks, with fills between them.

        acquire ─┬─► all experts are READY ─────────────────────────► acquired
                 ├─► some are missing ──► fill ─┬─► complete ───────► acquired
                 │                              └─► fails ──► abort ► as before, but what was evicted stays evicted
                 └─► BUSY ──► wait, and try again; or BusyError

    An engine's C++ threads make the same calls with the same locks. Thread-safe. `held` is an int32 array with the
    slots of a call's experts and a mark behind them, as `planner/policy/calls/locked_calls.py` describes it. The main
    thread must be in a region of `interrupts.py` when it calls `acquire`.
    """

    def __init__(
        self, residency: Residency, locks: LayerLocks, fill: Fill, require_not_forked: Callable[[], None]
    ) -> None:
        """Connect the parts. `fill(layer, experts, slots)` fills slots or raises; it is called with no lock held.

        `require_not_forked` is called before a wait for a lock, and raises in a forked child, where the lock might be
        held for ever.
        """
        self._require_not_forked = require_not_forked
        self._residency = residency
        self._locks = locks.address
        self._fill = fill

    def acquire(self, layer: int, experts: I32, held: I32, may_wait: Callable[[], bool]) -> None:
        """Bring distinct `experts` into slots, READY and pinned, and write the slots into `held`.

        The mark in `held` must say that no slot is pinned yet.

        Where too few slots are unpinned, the call waits for other threads to release some. It does so only where
        `may_wait()` is true, which means that the calling thread holds no slots itself: two threads that hold slots and
        wait for more could wait for each other for ever. Otherwise it raises `BusyError`. It may always wait for the
        end of a fill, because no fill waits for a lease. That is a fill of an expert that this call needs, or a
        prefetch whose slot becomes unpinned when it ends.

        Where the call raises, it leaves no slot pinned or half filled.
        """
        try:
            missing = self._begin(layer, experts, held, may_wait)
            if len(missing):
                self._fill(layer, experts[missing], held[missing])
                status = self._residency.complete_held(self._locks, layer, held)
                assert status >= 0, f"layer {layer}: no slots {held[:-1].tolist()}"
        except BaseException:
            self._residency.abort_held(self._locks, layer, held)
            raise

    def release(self, layer: int, held: I32) -> None:
        """Unpin the slots in `held`, which `acquire` or the policy's `try_pin_hits` pinned; nothing where unpinned."""
        if self._residency.try_release_held(self._locks, layer, held) != 0:
            self._require_not_forked()
            status = self._residency.release_held(self._locks, layer, held)
            assert status == 0, f"layer {layer}: slots {held[:-1].tolist()} were not all pinned"

    def resident_first(self, layer: int, experts: I32) -> None:
        """Reorder `experts` in place: experts that are in slots come first."""
        self._residency.order_resident_first(self._locks, layer, experts)

    def _begin(self, layer: int, experts: I32, held: I32, may_wait: Callable[[], bool]) -> I32:
        """Choose and pin a slot for each expert; return the indices of the experts whose bytes are missing."""
        miss_index = np.empty(len(experts), np.int32)
        waits = False
        while True:
            deadline = wait_deadline()
            status = self._residency.begin_held(
                self._locks, layer, experts, held, miss_index, ctypes.addressof(deadline), waits=waits
            )
            if status >= 0:
                return miss_index[:status]
            assert status in (Outcome.BUSY, Outcome.LOOK_AGAIN), (
                f"layer {layer}: {status} for experts {experts.tolist()}"
            )
            raise_pending()
            if status == Outcome.BUSY and not waits:
                if not may_wait():
                    n_slots = int(self._residency.n_slots[layer])
                    raise BusyError(
                        f"asked for {len(experts)} experts of layer {layer}: too few of its {n_slots} slots are "
                        "unpinned, and this thread holds leases, so it must not wait: release one, or acquire "
                        "fewer experts"
                    )
                waits = True
