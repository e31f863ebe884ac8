"""Decisions without bytes: which expert leaves a slot, and how many slots a layer gets.

    demand.py, allocate.py   what a layer needs; a plan of slots under a budget
    policy.py                look-up, admission and eviction, as compiled functions over arrays
    residency.py             those arrays, and the functions as methods for Python
    native.py                the same functions as C function pointers for an engine's threads

Nothing here opens a device or a file, and importing it loads no compiler: Numba comes with the first
`Residency`.
"""

from __future__ import annotations

from expertier.planner.allocate import LayerPlan, plan_layers
from expertier.planner.demand import LayerDemand
from expertier.planner.outcome import Outcome
from expertier.planner.policy_kind import PolicyKind

__all__ = ["LayerDemand", "LayerPlan", "Outcome", "PolicyKind", "plan_layers"]
