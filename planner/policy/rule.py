"""What a file in `policies/` must define."""

from __future__ import annotations

from typing import Any, Protocol

from expertier.planner.policy.tables import I32, I64, LayerView


class Rule(Protocol):
    """A policy: it ranks the experts of a layer, and the unpinned slot of the lowest rank is the next victim.

    `step` and `use` are compiled into `begin`, so they keep to what Numba compiles, and with
    `NUMBA_DISABLE_JIT=1` they run in the interpreter: make numbers `int` before a result could exceed their type.
    """

    @staticmethod
    def n_notes(n_experts: int) -> int:
        """Return how many int32 of its own the policy keeps for a layer (`view.notes`); they start as 0."""

    @staticmethod
    def step(view: LayerView, experts: I32, n: int, n_missing: int, now: int) -> None:
        """Note that a call begins.

        It is the layer's `now`-th, counted from 1, asks for `n` `experts` and misses `n_missing` of them.
        A policy that changes the rank of experts outside the call writes it to `order` here.
        """

    @staticmethod
    def use(view: LayerView, expert: int, now: int) -> int:
        """Count a use of `expert` in the call `now`; returns its rank from now on: 1 and more, below 2^46."""

    @staticmethod
    def reheated(ranks: I64, heat: I64) -> I64:
        """Return the ranks of residents whose heat was set from outside; plain NumPy, not compiled."""

    begin: Any
    """`policy.begin_for(__name__)`: the look-up with this policy's functions in it."""
