"""The layouts of the positions that a boundary has been at."""

from __future__ import annotations

from collections.abc import Sequence

from expertier.errors import BudgetError
from expertier.planner.budget.demand import LayerDemand
from expertier.planner.budget.shrink import shrink
from expertier.tiers.slots.arena_layout import ArenaLayout
from expertier.tiers.slots.slab import Slab

MOST_LAYOUTS = 16
"""A boundary moves in sixteenths of a compute buffer; each layout knows all pieces of all slots, 24 bytes each."""


class Positions:
    """Lays the layers' quotas out above a compute region, and keeps what it found. Not thread-safe."""

    def __init__(self, slab: Slab, demands: Sequence[LayerDemand]) -> None:
        """Start with none."""
        self._slab = slab
        self._demands = demands
        self._quotas: tuple[int, ...] = ()
        self._layouts: dict[tuple[int, int], ArenaLayout] = {}

    def layout(self, quotas: tuple[int, ...], compute_bytes: int, slab_bytes: int) -> ArenaLayout:
        """Return the layout of `quotas`, or of what of them a compute region leaves; `BudgetError`: not one slot."""
        if quotas != self._quotas:
            self._quotas = quotas
            self._layouts.clear()
        found = self._layouts.pop((compute_bytes, slab_bytes), None)
        if found is None:
            try:
                found = self._slab.plan(quotas, compute_bytes, slab_bytes)
            except BudgetError:
                slots = shrink(quotas, self._demands, budget_bytes=slab_bytes - compute_bytes).slots
                found = self._slab.plan(slots, compute_bytes, slab_bytes)
        self._layouts[compute_bytes, slab_bytes] = found  # in the order of use, so that the first may go
        if len(self._layouts) > MOST_LAYOUTS:
            del self._layouts[next(iter(self._layouts))]
        return found
