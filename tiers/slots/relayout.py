"""The transaction that changes where slots lie and how many each layer has."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import numpy as np

from expertier.errors import DeviceError
from expertier.hip.fence import Fence
from expertier.planner.policy.repack import Survivors, choose_survivors
from expertier.planner.policy.residency import Residency
from expertier.tiers.host_pool.pool import HostPool
from expertier.tiers.shared.stats import MoveStats
from expertier.tiers.slots.arena_layout import ArenaLayout
from expertier.tiers.slots.fences import SlotFences
from expertier.tiers.slots.slab import Slab
from expertier.tiers.slots.survivors import in_place


class Relayout:
    """Moves the slots, all or nothing, while no other thread uses the tiers (I12).

    A new layout ──► choice of survivors ──► moves on the device ──► zeros ──► tables
                                               └── fails ──► the old layout, with the experts that are intact

    The survivors are the hottest experts of each layer; all other experts leave L1 as if they were evicted.
    """

    def __init__(
        self, slab: Slab, residency: Residency, pool: HostPool, fences: SlotFences, stream: int
    ) -> None:
        """Connect the parts; the work will be queued on `stream`."""
        self._slab = slab
        self._residency = residency
        self._pool = pool
        self._fences = fences
        self._stream = stream
        self._stats = MoveStats()

    def run(
        self,
        new: ArenaLayout,
        *,
        in_order_where_all_fit: bool = False,
        meanwhile: Callable[[], None] | None = None,
    ) -> Fence | None:
        """Lay out the slots as `new`, a result of `Slab.plan`, says; it may be for a slab of another size.

        `in_order_where_all_fit` is passed to `repack.choose_survivors` in planner. `meanwhile` is called when layout
        and tables are the new ones, while the device may still be moving bytes. Returns the fence after which the
        device has done the move; None where it has done it already. Raises `DeviceError` where a call to the device
        failed: slots and compute region are then as before, and experts whose bytes were lost are no longer resident.
        """
        old = self._slab.slots
        shifts = self._slab.layout.shifts_to(new)
        survivors = choose_survivors(
            self._residency, new.n_slots, shifts, in_order_where_all_fit=in_order_where_all_fit
        )
        self._fences.before_move(self._stream)
        try:
            moved_bytes = self._slab.relayout(new, survivors, self._stream)
        except BaseException:
            with suppress(DeviceError):
                self._slab.finish()
            intact = in_place(self._slab.still_there(new, survivors))
            lost = self._dropped(intact)
            self._residency.repack(old, intact)
            self._fences.after_move(self._stream)
            self._pool.touch(lost)
            with suppress(DeviceError):  # where this fails, the next use of the slots restores the guards
                self.restore_guards()
            raise
        try:  # the tables follow while the device moves
            dropped = self._dropped(survivors)
            self._residency.repack(new.slots, survivors)
            self._stats = self._stats.plus(moves=1, moved_bytes=moved_bytes, dropped=len(dropped))
            fence = self._fences.after_move(self._stream)
            self._pool.touch(dropped)
            if meanwhile is not None:
                meanwhile()
        finally:
            self._slab.finish()
        return fence

    def let_in(self, stream: int | None) -> None:
        """Have `stream` wait until no queued move touches the memory below the slots; None: the caller waits."""
        try:
            self._fences.before_read(0, (), stream)
        except DeviceError:  # the move was made, so this call must not fail
            self._fences.before_read(0, (), None)

    def restore_guards(self) -> None:
        """Zero the guards that a failed `run` may have left stale, while no thread uses the slots; `DeviceError`."""
        if self._slab.stale_guards:
            here = choose_survivors(self._residency, self._slab.slots, [0] * len(self._slab.slots))
            self._slab.restore_guards(here, self._stream)
            self._fences.after_move(self._stream)

    def stats(self) -> MoveStats:
        """Return the counts so far."""
        return self._stats

    # ---- inside

    def _dropped(self, survivors: Survivors) -> list[tuple[int, int]]:
        """Return (layer, expert) for each resident that is not in `survivors`."""
        if np.count_nonzero(self._residency.owner >= 0) == len(survivors.layer):
            return []
        goes = self._residency.slot_of >= 0  # every resident is READY, as no slot is pinned
        goes[survivors.layer, survivors.expert] = False
        layers, experts = np.nonzero(goes)
        return list(zip(layers.tolist(), experts.tolist(), strict=True))
