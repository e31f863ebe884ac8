"""Decisions without bytes: which expert leaves a slot, and how many slots a layer gets.

    demand.py, allocate.py      what a layer needs; a plan of slots under a budget
    allocate_by_profile.py      slots where a routing profile says that they save the most
    quotas.py                   new quotas from observed demand, where they pay
    profile.py                  heat and a loading order from a profile
    policy.py, policies/        look-up, admission and eviction; who leaves first, a file a policy
    tables.py, rule.py          the arrays that they work on; what a policy's file must have
    residency.py, repack.py     those arrays with the functions as methods; who stays when slots move
    native.py                   the same functions as C function pointers for an engine's threads
    python_calls.py             the same from Python, with c_calls.py or, uncompiled, interpreted.py under it
    replay.py                   recorded routing through the same functions

Nothing here opens a device or a file, and importing it loads no compiler: Numba comes with the first
`Residency`.
"""

from __future__ import annotations

from expertier.planner.allocate import LayerPlan, plan_layers
from expertier.planner.demand import LayerDemand
from expertier.planner.outcome import Outcome
from expertier.planner.policy_kind import PolicyKind

__all__ = ["LayerDemand", "LayerPlan", "Outcome", "PolicyKind", "plan_layers"]
