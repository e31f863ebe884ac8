"""A smaller plan in the proportions of another."""

from __future__ import annotations

from collections.abc import Sequence

from expertier.errors import BudgetError
from expertier.planner.allocate import LayerPlan, floor_bytes
from expertier.planner.demand import LayerDemand
from expertier.units import MIB, mib, mib_needed


def shrink(slots: Sequence[int], demands: Sequence[LayerDemand], *, budget_bytes: int) -> LayerPlan:
    """Return the plan that gives every layer the same share of its `slots` under `budget_bytes`.

    At least one slot a layer and never more than `slots`; what rounding leaves over goes to the layers that
    rounding cost most. The same arguments give the same plan, and a budget that holds `slots` gives `slots`:
    so a boundary that moves there and back comes back to where it was. Raises `BudgetError` below one slot a
    layer.
    """
    floor = floor_bytes(demands)
    if budget_bytes < floor:
        raise BudgetError(
            f"{budget_bytes / MIB:.3f} MiB are left for expert slots, but one slot in each of {len(demands)} "
            f"layers takes {mib(floor)}: leave at least {mib_needed(floor)} MiB"
        )
    most = max(slots)
    low, high = 0, most  # shares in units of 1/most: each number of slots of the largest layer once
    while low < high:
        middle = (low + high + 1) // 2
        if _bytes(_scaled(slots, middle, most), demands) <= budget_bytes:
            low = middle
        else:
            high = middle - 1
    chosen = _scaled(slots, low, most)
    left = budget_bytes - _bytes(chosen, demands)
    lost = sorted(range(len(slots)), key=lambda layer: (-(slots[layer] * (low + 1) % most), layer))
    for layer in lost:
        if chosen[layer] < slots[layer] and demands[layer].slot_bytes <= left:
            chosen[layer] += 1
            left -= demands[layer].slot_bytes
    return LayerPlan(tuple(chosen), _bytes(chosen, demands), budget_bytes)


def _scaled(slots: Sequence[int], share: int, most: int) -> list[int]:
    return [max(n * share // most, 1) for n in slots]


def _bytes(slots: Sequence[int], demands: Sequence[LayerDemand]) -> int:
    return sum(demand.bytes_for(n) for demand, n in zip(demands, slots, strict=True))
