"""Plans for both places of the boundary, such that a move to the wide one only drops experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from expertier.planner.budget.allocate import LayerPlan, plan_layers
from expertier.planner.budget.demand import LayerDemand


@dataclass(frozen=True, slots=True)
class PlanPair:
    """Slots while batches are narrow, and while a wide batch computes; no layer has more slots in the `wide` plan."""

    narrow: LayerPlan
    wide: LayerPlan
    move_bytes: int
    """Bytes that a move to the `wide` plan drops, and that a move back may fetch again."""


def plan_pair(
    demands: Sequence[LayerDemand],
    narrow_bytes: int,
    wide_bytes: int,
    profile: npt.NDArray[np.generic] | None = None,
) -> PlanPair:
    """Return both plans. `profile` is as `plan_layers` takes it.

    The wide plan keeps slots of the narrow plan: with a profile the slots that save the most, else equal numbers.
    Raises `BudgetError` where the smaller budget is less than one slot a layer, and `ValueError` where the wide budget
    is larger than the narrow one.
    """
    if wide_bytes > narrow_bytes:
        raise ValueError(
            f"the wide boundary leaves {wide_bytes} bytes for slots, the narrow one only {narrow_bytes}"
        )
    narrow = plan_layers(demands, budget_bytes=narrow_bytes, profile=profile)
    held = [
        replace(demand, n_experts=n, top_k=min(demand.top_k, n))
        for demand, n in zip(demands, narrow.slots, strict=True)
    ]
    uses = None
    if profile is not None:
        ordered = -np.sort(-np.asarray(profile, np.float64), axis=1)
        uses = ordered[:, : max(narrow.slots)]
    wide = plan_layers(held, budget_bytes=wide_bytes, profile=uses)
    moved = sum(
        (a - b) * demand.slot_bytes for a, b, demand in zip(narrow.slots, wide.slots, demands, strict=True)
    )
    return PlanPair(narrow, wide, moved)
