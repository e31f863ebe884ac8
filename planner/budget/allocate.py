"""The plan of slots: how many slots each layer gets under a budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from expertier.errors import BudgetError
from expertier.planner.budget.allocate_by_profile import best_slots, marginal_gains, tell_apart
from expertier.planner.budget.demand import LayerDemand
from expertier.units import MIB, mib, mib_needed


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """Slots for every layer: `slots[layer]` of them, `used_bytes` in all, within `budget_bytes`."""

    slots: tuple[int, ...]
    used_bytes: int
    budget_bytes: int


def floor_bytes(demands: Sequence[LayerDemand]) -> int:
    """Return the hard floor: the bytes of one slot in every layer."""
    return sum(demand.bytes_for(1) for demand in demands)


def full_bytes(demands: Sequence[LayerDemand]) -> int:
    """Return the bytes of a slot for every expert, beyond which more bytes are of no use."""
    return sum(demand.bytes_for(demand.n_experts) for demand in demands)


def plan_layers(
    demands: Sequence[LayerDemand], *, budget_bytes: int, profile: npt.NDArray[np.generic] | None = None
) -> LayerPlan:
    """Share `budget_bytes` out over the layers.

    Without `profile` every layer gets the same number of slots, but never more than it has experts. The bytes that
    equal numbers leave over go to the first layers whose slots they fit, one slot each.

    `profile` has the uses of every expert, [layers, most experts] numbers of 0 and more. With it the slots go where
    they save the most bytes for each byte that they take (`allocate_by_profile.py`). A profile that does not tell the
    layers apart changes nothing.

    Raises `BudgetError` below one slot a layer, with the smallest budget that works, and `ValueError` unless
    `demands` describes the layers 0, 1, ... in order and `profile` the same experts.
    """
    if not demands or [demand.layer for demand in demands] != list(range(len(demands))):
        raise ValueError(f"demands must describe layers 0, 1, ... in order, got {[d.layer for d in demands]}")
    floor = floor_bytes(demands)
    if budget_bytes < floor:
        raise BudgetError(
            f"asked for {budget_bytes / MIB:.3f} MiB of expert slots, but one slot in each of {len(demands)} "
            f"layers takes {mib(floor)}: give at least {mib_needed(floor)} MiB"
        )
    equal = _equal_slots(demands, budget_bytes)
    gains = None if profile is None else marginal_gains(demands, profile)
    if gains is None or not tell_apart(gains):
        slots = _with_left_over(demands, equal, budget_bytes)
    else:
        floors = [min(demand.top_k, equal, demand.n_experts) for demand in demands]
        slots = best_slots(demands, gains, floors, budget_bytes)
    used = sum(demand.bytes_for(n) for demand, n in zip(demands, slots, strict=True))
    return LayerPlan(tuple(slots), used, budget_bytes)


def _equal_slots(demands: Sequence[LayerDemand], budget_bytes: int) -> int:
    """Return the largest number of slots that every layer can have; a layer with fewer experts has a slot for each."""
    low, high = 1, max(demand.n_experts for demand in demands)
    while low < high:
        middle = (low + high + 1) // 2
        if _equal_bytes(demands, middle) <= budget_bytes:
            low = middle
        else:
            high = middle - 1
    return low


def _with_left_over(demands: Sequence[LayerDemand], equal: int, budget_bytes: int) -> list[int]:
    """Return `equal` slots a layer, and one slot more in the first layers whose slots the leftover bytes fit."""
    slots = [min(equal, demand.n_experts) for demand in demands]
    left = budget_bytes - _equal_bytes(demands, equal)
    for demand in demands:
        if slots[demand.layer] < demand.n_experts and demand.slot_bytes <= left:
            slots[demand.layer] += 1
            left -= demand.slot_bytes
    return slots


def _equal_bytes(demands: Sequence[LayerDemand], n_slots: int) -> int:
    """Return the bytes of `n_slots` slots a layer, capped by each layer's experts."""
    return sum(demand.bytes_for(min(n_slots, demand.n_experts)) for demand in demands)
