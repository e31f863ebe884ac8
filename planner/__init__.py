"""Decisions without bytes: which expert leaves a slot, and how many slots a layer gets.

README.md beside this file lists the rooms. Importing the package loads no compiler: Numba comes with the first
`Residency`.
"""

from __future__ import annotations

from expertier.planner.budget.allocate import LayerPlan, plan_layers
from expertier.planner.budget.demand import LayerDemand
from expertier.planner.policy.kind import PolicyKind
from expertier.planner.policy.outcome import Outcome

__all__ = ["LayerDemand", "LayerPlan", "Outcome", "PolicyKind", "plan_layers"]
