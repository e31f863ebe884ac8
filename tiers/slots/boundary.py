"""The boundary between the slab's compute region and its slots."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from expertier.errors import BudgetError, BusyError, DeviceError
from expertier.planner.budget.allocate import LayerPlan, floor_bytes, plan_layers
from expertier.planner.budget.demand import LayerDemand
from expertier.planner.budget.shrink import shrink
from expertier.tiers.access.usage import WAIT_S, Usage
from expertier.tiers.model.slot_layout import RANGE_ALIGNMENT
from expertier.tiers.slots.positions import Positions
from expertier.tiers.slots.relayout import Relayout
from expertier.tiers.slots.slab import Slab
from expertier.units import MIB, round_up


@dataclass(frozen=True, slots=True)
class ComputeRegion:
    """Device memory that is free of slots: `n_bytes` from `address`, which never changes."""

    address: int
    n_bytes: int


class Boundary:
    """Moves the boundary: up at once when more memory is reserved, down again when that pays.

    A release does not move the boundary; it only allows a move down (hysteresis). The boundary moves down once the
    misses since the release have cost as many bytes as the slots that the move gives back can hold. A needless move
    costs as much: the experts that are fetched into these slots are dropped at the next `reserve`. So alternating
    prefill and decode never costs more than twice what the better choice, to move or to stay, would have cost.
    """

    def __init__(
        self,
        slab: Slab,
        relayout: Relayout,
        usage: Usage,
        demands: Sequence[LayerDemand],
        bytes_missed: Callable[[], int],
        arena_bytes: int,
        quotas: Sequence[int],
    ) -> None:
        """Start with the slab's present layout.

        `bytes_missed` returns how many bytes L1's misses have cost so far. `quotas` has the slots that each layer gets
        while nothing is reserved for computing.
        """
        self.arena_bytes = arena_bytes
        """The slab's size as asked for, before it was rounded up. Only `resize` changes it."""
        self._slab = slab
        self._relayout = relayout
        self._usage = usage
        self._demands = demands
        self._floor_bytes = floor_bytes(demands)
        self._positions = Positions(slab, demands)
        self._bytes_missed = bytes_missed
        self._lock = threading.Lock()  # guards the fields below; never held during a move
        self._quotas = tuple(quotas)
        self._wanted_bytes = 0
        self._going_to: int | None = None  # the compute bytes after a move down that is under way
        self.pays_at: int | None = None
        """A move down pays once `bytes_missed` reaches this; None: no move down is possible. Read without a lock."""

    def reserve(self, n_bytes: int, stream: int | None) -> ComputeRegion:
        """See `TierManager.reserve_compute`."""
        self._require_room(n_bytes)
        with self._lock:
            enough = n_bytes <= self._steady_bytes()
            if enough:
                self._want(n_bytes)
        if not enough:
            with self._usage.exclusively("reserve compute memory"):
                if n_bytes > self._slab.layout.compute_bytes:  # False where another thread was faster
                    self._lay_out(n_bytes)
                with self._lock:
                    self._want(n_bytes)
        self._relayout.let_in(stream)
        return ComputeRegion(self._slab.base, self._slab.layout.compute_bytes)

    def move(
        self, n_bytes: int, plan: LayerPlan | None = None, meanwhile: Callable[[], None] | None = None
    ) -> None:
        """See `TierManager.move_boundary`."""
        self._require_room(n_bytes)
        if plan is not None:
            self._slab.plan(plan.slots, 0)  # raises where the plan does not fit even the whole slab
        with self._usage.exclusively("move the boundary", for_engine=True):
            with self._lock:
                self._wanted_bytes = n_bytes
            try:
                if plan is not None:
                    self._give_quotas(
                        plan.slots,
                        self._slab.n_bytes,
                        n_bytes,
                        in_order_where_all_fit=True,
                        meanwhile=meanwhile,
                    )
                elif round_up(n_bytes, RANGE_ALIGNMENT) != self._slab.layout.compute_bytes:
                    self._lay_out(n_bytes, in_order_where_all_fit=True, meanwhile=meanwhile)
            finally:
                with self._lock:  # the engine uses all that it was given, so there is no reason to move down
                    self._wanted_bytes = self._slab.layout.compute_bytes
                    self.pays_at = None

    def most_bytes(self) -> int:
        """Return how many bytes can be free of slots: all of the slab except one slot for each layer."""
        return max(self._slab.n_bytes - self._floor_bytes, 0)

    def release(self, n_bytes: int) -> None:
        """See `TierManager.release_compute`."""
        with self._lock:
            if n_bytes >= self._wanted_bytes:
                return
            self._wanted_bytes = n_bytes
            if self.pays_at is None:
                self.pays_at = self._pays_from_now()

    def lower(self, *, now: bool) -> bool:
        """Move down to what is still reserved, where that pays; with `now`, even where it does not.

        Returns whether the boundary moved. Without `now` it does not move where leases or an engine are in the way or a
        call to the device fails; the next call tries again.
        """
        pays_at = self.pays_at
        if not now and (pays_at is None or self._bytes_missed() < pays_at):
            return False
        if not self._gain():
            return False
        try:
            with self._usage.exclusively("give compute memory back", wait_s=WAIT_S if now else 0):
                with self._lock:  # asked again, because another thread may have reserved memory meanwhile
                    wanted = self._wanted_bytes
                    if not self._gain():
                        return False
                    self._going_to = wanted
                try:
                    self._lay_out(wanted)
                finally:
                    self._going_to = None
        except (BusyError, DeviceError):
            if now:
                raise
            return False
        return True

    @property
    def quotas(self) -> tuple[int, ...]:
        """How many slots each layer gets while nothing is reserved for computing."""
        return self._quotas

    def apply(self, plan: LayerPlan, *, wait_s: float = WAIT_S) -> None:
        """Make `plan` the quotas of the whole slab, and give the layers what the compute region leaves of them."""
        self._slab.plan(plan.slots, 0)  # raises where the plan does not fit even the whole slab
        with self._usage.exclusively("apply a plan", wait_s=wait_s):
            self._give_quotas(plan.slots, self._slab.n_bytes)

    def resize(self, n_bytes: int) -> None:
        """See `TierManager.resize_arena`."""
        size = round_up(n_bytes, RANGE_ALIGNMENT)
        with self._usage.exclusively("resize the arena"):
            if size > self._slab.n_bytes:
                quotas = plan_layers(self._demands, budget_bytes=size).slots
            else:
                quotas = shrink(self._quotas, self._demands, budget_bytes=size).slots
            self._slab.admit(size)
            try:
                self._give_quotas(quotas, size)
                self.arena_bytes = n_bytes
            finally:
                self._slab.fit()

    # ---- inside

    def _require_room(self, n_bytes: int) -> None:
        most = self.most_bytes()
        if n_bytes > most:
            raise BudgetError(
                f"asked for {n_bytes / MIB:.3f} MiB to compute in, of a slab of {self._slab.n_bytes / MIB:.3f} "
                f"MiB: with one slot a layer left, {most / MIB:.3f} MiB is the most; ask for less, or "
                "give the expert cache more"
            )
        if n_bytes < 0:
            raise ValueError(f"asked for {n_bytes} bytes to compute in: give 0 or more")

    def _give_quotas(
        self,
        slots: Sequence[int],
        slab_bytes: int,
        compute_bytes: int | None = None,
        *,
        in_order_where_all_fit: bool = False,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Make `slots` the quotas, in a slab of `slab_bytes`; where that fails, the quotas are as before."""
        quotas, layout = self._quotas, self._slab.layout
        self._quotas = tuple(slots)
        try:
            self._lay_out(
                layout.compute_bytes if compute_bytes is None else compute_bytes,
                slab_bytes,
                in_order_where_all_fit=in_order_where_all_fit,
                meanwhile=meanwhile,
            )
        except BaseException:
            if self._slab.layout is layout:
                self._quotas = quotas
            raise

    def _lay_out(
        self,
        compute_bytes: int,
        slab_bytes: int | None = None,
        *,
        in_order_where_all_fit: bool = False,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Give the layers their quotas, shrunk where the compute region leaves too little room for them."""
        compute_bytes = round_up(compute_bytes, RANGE_ALIGNMENT)
        size = self._slab.n_bytes if slab_bytes is None else slab_bytes
        new = self._positions.layout(self._quotas, compute_bytes, size)
        layout = self._slab.layout
        try:
            self._relayout.run(new, in_order_where_all_fit=in_order_where_all_fit, meanwhile=meanwhile)
        finally:  # also where an interrupt comes after the move was made
            if self._slab.layout is not layout:
                with self._lock:
                    self.pays_at = self._pays_from_now()

    # ---- with the lock held

    def _steady_bytes(self) -> int:
        """Return how many bytes are free of slots now and after a move that is under way."""
        compute_bytes = self._slab.layout.compute_bytes
        return compute_bytes if self._going_to is None else min(self._going_to, compute_bytes)

    def _want(self, n_bytes: int) -> None:
        self._wanted_bytes = max(self._wanted_bytes, n_bytes)
        self.pays_at = self._pays_from_now()

    def _pays_from_now(self) -> int | None:
        """Return the value of `pays_at` where counting begins now; None where no move down is possible."""
        gained = self._gain()
        return self._bytes_missed() + gained if gained else None

    def _gain(self) -> int:
        """Return how many bytes a move down would give back to the slots."""
        return self._slab.layout.compute_bytes - round_up(self._wanted_bytes, RANGE_ALIGNMENT)
