"""Lets quotas follow demand: slots go to the layers whose misses cost most (D16)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import replace

from expertier.errors import BusyError, DeviceError
from expertier.planner.budget.demand import LayerDemand
from expertier.planner.budget.quotas import Proposal, UseCounts, propose
from expertier.planner.policy.residency import Residency
from expertier.tiers.slots.boundary import Boundary
from expertier.units import mib

STEPS_PER_SAMPLE = 27
"""Steps between samples of the policy's heat. It is no multiple of 20, since heat is halved every 20 steps."""

_log = logging.getLogger(__name__)


class Rebalance:
    """Samples how experts are used, and moves slots between layers where the planner says that it pays. Thread-safe."""

    def __init__(self, residency: Residency, boundary: Boundary, demands: Sequence[LayerDemand]) -> None:
        """Start without samples."""
        self._residency = residency
        self._boundary = boundary
        self._demands = demands
        self._lock = threading.Lock()
        self._counts = UseCounts(residency.heat.shape)
        self._sampled_at = 0

    def look(self, budget_bytes: int, weights: Sequence[float] | None = None) -> Proposal | None:
        """Sample demand where it is time; return new quotas of `budget_bytes` where they pay, else None.

        `weights` has for each layer the cost of a miss, relative to a miss that the engine waits for. A call between
        two samples is cheap.
        """
        with self._lock:
            steps = max(self._residency.by_layer("calls"))
            if steps - self._sampled_at < STEPS_PER_SAMPLE:
                return None
            self._counts.sample(self._residency.heat, steps - self._sampled_at)
            self._sampled_at = steps
            demands = self._demands
            if weights is not None:
                demands = [
                    replace(demand, weight=demand.weight * weight)
                    for demand, weight in zip(demands, weights, strict=True)
                ]
            return propose(demands, self._counts, self._boundary.quotas, budget_bytes=budget_bytes)

    def move_if_it_pays(self, budget_bytes: int) -> Proposal | None:
        """Do as `look`; where new quotas pay, move the slots to them and return the proposal.

        Returns None where nothing moved: the quotas do not pay, a lease or an engine is in the way, or the move failed.
        The next call tries again.
        """
        found = self.look(budget_bytes)
        if found is None:
            return None
        try:
            self._boundary.apply(found.plan, wait_s=0)
        except (BusyError, DeviceError) as error:
            _log.debug("new quotas have to wait: %s", error)
            return None
        log_move(found)
        return found


def log_move(found: Proposal) -> None:
    """Log that slots have moved as `found` proposed."""
    _log.info(
        "the layers' slots follow demand: of %s missed in a step, %s are expected to be saved, for a move of %s",
        mib(int(found.missed_bytes)),
        mib(int(found.saved_bytes)),
        mib(found.move_bytes),
    )
