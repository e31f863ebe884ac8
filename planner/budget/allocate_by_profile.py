"""Puts slots where they save the most, by what a routing profile says a layer's next slot is worth.

A slot for a layer's n-th most used expert saves that expert's uses times its bytes, and costs about its bytes:
so the gain for a byte is the number of uses. The gain falls from slot to slot, and taking the slots of all layers in
order of their gain is the optimum. Only where slots differ in size may the last ones leave some bytes unused.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from expertier.planner.budget.demand import LayerDemand

F64 = npt.NDArray[np.float64]


def marginal_gains(demands: Sequence[LayerDemand], profile: npt.NDArray[np.generic]) -> F64:
    """Return the uses that a layer's n-th slot serves, [layers, most experts], each layer's in falling order.

    A layer's `weight` multiplies its uses; -1 stands where the layer has no such expert. Raises `ValueError`
    for a profile of another shape, or with numbers below 0 or not finite.
    """
    most = max(demand.n_experts for demand in demands)
    if profile.shape != (len(demands), most):
        raise ValueError(
            f"the profile has uses of {profile.shape}, layers by experts: these layers have {(len(demands), most)}; "
            "make it from this model"
        )
    uses = np.asarray(profile, np.float64)
    if not (np.isfinite(uses).all() and (uses >= 0).all()):
        raise ValueError("some uses in the profile are below 0 or not finite")
    uses = uses * np.array([[demand.weight] for demand in demands])
    n_experts = np.array([[demand.n_experts] for demand in demands])
    gains: F64 = -np.sort(-np.where(np.arange(most) < n_experts, uses, -1.0), axis=1)
    return gains


def tell_apart(gains: F64) -> bool:
    """Whether the n-th slots of some layers, of those that have n experts, differ in gain."""
    return bool(((gains >= 0) & (gains != gains.max(axis=0))).any())


def best_slots(
    demands: Sequence[LayerDemand], gains: F64, floors: Sequence[int], budget_bytes: int
) -> list[int]:
    """Return the slots of each layer: `floors`, and beyond these the slots of the highest gains that fit the budget.

    The floors must fit the budget. Where the next slot does not fit, smaller slots of lower gain may. Of slots with
    equal gains the layer with fewer slots gets one first, then the layer that comes first.
    """
    slot_bytes = np.array([demand.slot_bytes for demand in demands], np.int64)
    slots = np.array(floors, np.int64)
    left = budget_bytes - sum(demand.bytes_for(n) for demand, n in zip(demands, floors, strict=True))
    layer, place = np.nonzero((gains >= 0) & (np.arange(gains.shape[1]) >= slots[:, np.newaxis]))
    order = np.lexsort((layer, place, -gains[layer, place]))
    layer, place = layer[order], place[order]
    total = np.cumsum(slot_bytes[layer])
    n_fitting = int(np.searchsorted(total, left, side="right"))
    slots += np.bincount(layer[:n_fitting], minlength=len(slots))
    left -= int(total[n_fitting - 1]) if n_fitting else 0
    smallest = int(slot_bytes.min())
    for number in layer[n_fitting:].tolist():  # a layer's slots come in order, and all have one size
        if left < smallest:
            break
        if slot_bytes[number] <= left:
            slots[number] += 1
            left -= int(slot_bytes[number])
    chosen: list[int] = slots.tolist()
    return chosen


def saved_bytes(demands: Sequence[LayerDemand], gains: F64, slots: Sequence[int]) -> float:
    """Return the bytes that `slots` save: uses of the experts that they hold, times the bytes of a slot."""
    return float(
        sum(
            demand.slot_bytes * np.maximum(row[:n], 0).sum()
            for demand, row, n in zip(demands, gains, slots, strict=True)
        )
    )
