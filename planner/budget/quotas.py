"""New numbers of slots from observed demand, where they pay for the move to them (D16)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from expertier.planner.budget.allocate import LayerPlan, plan_layers
from expertier.planner.budget.allocate_by_profile import F64, marginal_gains, saved_bytes
from expertier.planner.budget.demand import LayerDemand

HEAT_OF_ONE_USE_A_STEP = 480
"""Mean heat of an expert that every step uses, if heat did not saturate (+16 a use, halved every 20)."""


class UseCounts:
    """The experts' uses in the last steps, from samples of the policy's heat, which cost look-ups nothing.

    Heat looks back some tens of steps and saturates; quotas need hundreds of steps. So this class averages samples of
    the heat, and old samples fade with a half-life. It needs a policy that keeps heat (LFU-decay does, LRU does not).
    """

    def __init__(self, shape: tuple[int, int], half_life_steps: float = 1024.0) -> None:
        """Start with no samples; `shape` is [layers, most experts]."""
        self._sum = np.zeros(shape)
        self._steps = 0.0
        self._half_life = half_life_steps

    @property
    def steps(self) -> float:
        """How many steps the counts stand for; steps that have faded count in part."""
        return self._steps

    @property
    def uses(self) -> F64:
        """Uses an expert a step, [layers, most experts]; zeros before the first sample."""
        return self._sum / max(self._steps, 1.0)

    def sample(self, heat: npt.NDArray[np.uint8], n_steps: int) -> None:
        """Take a sample of the heat, `n_steps` steps after the last one.

        A good distance is 27 steps: with a multiple of 20 all samples would come just after heat was halved, or all
        just before.
        """
        if n_steps > 0:
            kept = 0.5 ** (n_steps / self._half_life)
            self._sum *= kept
            self._sum += heat * (n_steps / HEAT_OF_ONE_USE_A_STEP)
            self._steps = self._steps * kept + n_steps


@dataclass(frozen=True, slots=True)
class Proposal:
    """New quotas, which are expected to save `saved_bytes` a step and take a move of `move_bytes`."""

    plan: LayerPlan
    saved_bytes: float
    missed_bytes: float
    """Bytes of misses expected a step with the present quotas."""
    move_bytes: int
    """Bytes that the new slots hold and that have to be fetched into them."""


@dataclass(frozen=True, slots=True)
class Hysteresis:
    """When new quotas are worth the move; all three conditions must hold.

    The counts rest on `uses_seen` uses of the average expert or more; the saving within `horizon_steps` is
    `payback` times the bytes of the move or more; and the saving is a share of `min_share` of all missed bytes or more.
    Use counts say more about wide quotas than about tight ones, where the experts used last matter: on recorded
    routing, moves for a forecast of 2 to 6 % cost up to 3 % more misses (docs/measurements/quotas.md).
    """

    uses_seen: float = 4.0
    horizon_steps: float = 256.0
    payback: float = 2.0
    min_share: float = 0.08


def propose(
    demands: Sequence[LayerDemand],
    counts: UseCounts,
    slots: Sequence[int],
    *,
    budget_bytes: int,
    hysteresis: Hysteresis | None = None,
) -> Proposal | None:
    """Return better quotas than `slots`, or None where the move would not pay.

    Every use of an expert that is not among a layer's `slots[layer]` most used ones counts as a miss. Pure; raises what
    `plan_layers` raises.
    """
    hysteresis = hysteresis if hysteresis is not None else Hysteresis()
    if counts.steps * min(d.top_k / d.n_experts for d in demands) < hysteresis.uses_seen:
        return None
    uses = counts.uses
    plan = plan_layers(demands, budget_bytes=budget_bytes, profile=uses)
    gains = marginal_gains(demands, uses)
    most = saved_bytes(demands, gains, [demand.n_experts for demand in demands])
    now = saved_bytes(demands, gains, slots)
    saved = saved_bytes(demands, gains, plan.slots) - now
    missed = most - now
    move_bytes = sum(
        max(new - old, 0) * demand.slot_bytes
        for demand, new, old in zip(demands, plan.slots, slots, strict=True)
    )
    if plan.slots == tuple(slots) or saved < hysteresis.min_share * missed:
        return None
    if saved * hysteresis.horizon_steps < hysteresis.payback * move_bytes:
        return None
    return Proposal(plan, saved, missed, move_bytes)
