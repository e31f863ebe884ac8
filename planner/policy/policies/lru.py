"""LRU: the expert that was used longest ago leaves first."""

from __future__ import annotations

from expertier.planner.policy.policy import begin_for
from expertier.planner.policy.tables import I32, I64, LayerView, compiled


def n_notes(_n_experts: int) -> int:
    """Return 0: the ranks say everything."""
    return 0


@compiled
def step(_view: LayerView, _experts: I32, _n: int, _n_missing: int, _now: int) -> None:
    """Change nothing: time alone does not move one expert past another."""


@compiled
def use(_view: LayerView, _expert: int, now: int) -> int:
    """Return the call's number as the rank."""
    return now


def reheated(ranks: I64, _heat: I64) -> I64:
    """Return the ranks as they are: heat means nothing here."""
    return ranks


begin = begin_for(__name__)
