"""A smaller plan of slots in the proportions of a larger one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from expertier.errors import BudgetError
from expertier.planner.budget.allocate import LayerPlan, floor_bytes
from expertier.planner.budget.demand import LayerDemand
from expertier.units import MIB, mib, mib_needed

I64 = npt.NDArray[np.int64]


def shrink(slots: Sequence[int], demands: Sequence[LayerDemand], *, budget_bytes: int) -> LayerPlan:
    """Return the plan that gives every layer the same share of its `slots` under `budget_bytes`.

    Every layer gets at least one slot and never more than its `slots`. The bytes that rounding leaves over go to the
    layers that rounding cost most. The same arguments give the same plan, and a budget that holds `slots` gives
    `slots`, so that a boundary that moves there and back comes back to where it was. Raises `BudgetError` below one
    slot a layer.
    """
    floor = floor_bytes(demands)
    if budget_bytes < floor:
        raise BudgetError(
            f"{budget_bytes / MIB:.3f} MiB are left for expert slots, but one slot in each of {len(demands)} "
            f"layers takes {mib(floor)}: leave at least {mib_needed(floor)} MiB"
        )
    quotas = np.array(slots, np.int64)
    slot_bytes = np.array([demand.slot_bytes for demand in demands], np.int64)
    fixed_bytes = sum(demand.fixed_bytes for demand in demands)
    most = int(quotas.max())

    def scaled(share: int) -> I64:
        return np.maximum(quotas * share // most, 1)

    low, high = 0, most  # shares in units of 1/most: each number of slots of the largest layer once
    while low < high:
        middle = (low + high + 1) // 2
        if int(scaled(middle) @ slot_bytes) + fixed_bytes <= budget_bytes:
            low = middle
        else:
            high = middle - 1
    chosen: list[int] = scaled(low).tolist()
    left = budget_bytes - fixed_bytes - int(scaled(low) @ slot_bytes)
    lost: list[int] = np.argsort(-(quotas * (low + 1) % most), kind="stable").tolist()
    for layer in lost:
        if chosen[layer] < slots[layer] and demands[layer].slot_bytes <= left:
            chosen[layer] += 1
            left -= demands[layer].slot_bytes
    return LayerPlan(tuple(chosen), budget_bytes - left, budget_bytes)
