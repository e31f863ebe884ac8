"""Computes the layout for each position of the boundary, and remembers it."""

from __future__ import annotations

from collections.abc import Sequence

from expertier.errors import BudgetError
from expertier.planner.budget.demand import LayerDemand
from expertier.planner.budget.shrink import shrink
from expertier.tiers.slots.arena_layout import ArenaLayout
from expertier.tiers.slots.slab import Slab

MOST_LAYOUTS = 16
"""How many layouts are remembered: a boundary moves in sixteenths of a compute buffer.

A layout takes 24 bytes of memory for each piece of each slot.
"""


class Positions:
    """Lays the layers' quotas out above a compute region, and remembers the layouts. Not thread-safe."""

    def __init__(self, slab: Slab, demands: Sequence[LayerDemand]) -> None:
        """Start without layouts."""
        self._slab = slab
        self._demands = demands
        self._quotas: tuple[int, ...] = ()
        self._layouts: dict[tuple[int, int], ArenaLayout] = {}

    def layout(self, quotas: tuple[int, ...], compute_bytes: int, slab_bytes: int) -> ArenaLayout:
        """Return the layout of `quotas` slots, shrunk where the slab has no room for them above `compute_bytes`.

        Raises `BudgetError` where it has no room for one slot in each layer.
        """
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
        self._layouts[compute_bytes, slab_bytes] = found  # in the order of use: the first is dropped
        if len(self._layouts) > MOST_LAYOUTS:
            del self._layouts[next(iter(self._layouts))]
        return found
