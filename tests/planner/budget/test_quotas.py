"""New quotas: proposed where they pay, and not where the evidence or the saving is thin."""

from __future__ import annotations

import numpy as np
import pytest

from expertier.planner import LayerDemand, PolicyKind, plan_layers
from expertier.planner.budget.quotas import Hysteresis, UseCounts, propose
from expertier.planner.policy.residency import Residency
from policy_runs.played_steps import play

N_LAYERS, N_EXPERTS, TOP_K, SLOT_BYTES = 4, 16, 2, 100
DEMANDS = [
    LayerDemand(layer=layer, n_experts=N_EXPERTS, top_k=TOP_K, slot_bytes=SLOT_BYTES, fixed_bytes=0)
    for layer in range(N_LAYERS)
]
BUDGET = N_LAYERS * 8 * SLOT_BYTES
EQUAL = plan_layers(DEMANDS, budget_bytes=BUDGET).slots


def routing(spread: tuple[int, ...], n_steps: int, seed: int = 0) -> np.ndarray:
    """Steps that draw from the first `spread[layer]` experts of each layer, evenly."""
    rng = np.random.default_rng(seed)
    steps = np.empty((n_steps, N_LAYERS, TOP_K), np.int32)
    for step in range(n_steps):
        for layer, n in enumerate(spread):
            steps[step, layer] = rng.permutation(n)[:TOP_K]
    return steps


def observed(steps: np.ndarray, every: int = 27) -> UseCounts:
    """Counts as a manager would take them."""
    residency = Residency([N_EXPERTS] * N_LAYERS, EQUAL, PolicyKind.LFU_DECAY)
    counts = UseCounts((N_LAYERS, N_EXPERTS))
    for start in range(10, len(steps), every):
        play(residency, steps[start - 10 : start + every - 10])
        counts.sample(residency.heat, every)
    return counts


def misses(steps: np.ndarray, slots: tuple[int, ...]) -> int:
    residency = Residency([N_EXPERTS] * N_LAYERS, slots, PolicyKind.LFU_DECAY)
    play(residency, steps)
    return residency.totals()["misses"]


def test_counts_estimate_uses_a_step() -> None:
    counts = observed(routing((4, 8, 16, 16), 800))
    assert counts.steps == pytest.approx(800, rel=0.35)
    expected = np.array([[2 / n if e < n else 0.0 for e in range(N_EXPERTS)] for n in (4, 8, 16, 16)])
    assert counts.uses[1:] == pytest.approx(expected[1:], abs=0.06)
    assert counts.uses[0, :4].min() > counts.uses[1:].max(), "heat saturates, but keeps the order"
    assert not counts.uses[0, 4:].any()


def test_old_counts_fade() -> None:
    counts = UseCounts((1, 2), half_life_steps=100)
    counts.sample(np.array([[240, 0]], np.uint8), 100)
    counts.sample(np.array([[0, 240]], np.uint8), 100)
    assert counts.uses[0, 1] == pytest.approx(2 * counts.uses[0, 0])
    assert counts.steps == pytest.approx(150)


def test_layers_that_differ_get_other_quotas_and_miss_less() -> None:
    steps = routing((4, 4, 14, 14), 600)
    proposal = propose(DEMANDS, observed(steps), EQUAL, budget_bytes=BUDGET)
    assert proposal is not None
    assert proposal.plan.used_bytes <= BUDGET
    assert proposal.plan.slots[0] < 8 < proposal.plan.slots[2]
    assert 0 < proposal.saved_bytes <= proposal.missed_bytes
    gained = sum(max(new - old, 0) for new, old in zip(proposal.plan.slots, EQUAL, strict=True))
    assert proposal.move_bytes == gained * SLOT_BYTES
    later = routing((4, 4, 14, 14), 600, seed=1)
    saved = (misses(later, EQUAL) - misses(later, proposal.plan.slots)) * SLOT_BYTES / len(later)
    assert saved == pytest.approx(proposal.saved_bytes, rel=0.35), "the forecast was right"
    assert propose(DEMANDS, observed(steps), proposal.plan.slots, budget_bytes=BUDGET) is None, (
        "and that's that"
    )


def test_layers_that_are_alike_keep_their_quotas() -> None:
    for seed in range(5):
        assert propose(DEMANDS, observed(routing((12,) * 4, 400, seed)), EQUAL, budget_bytes=BUDGET) is None


def test_thin_evidence_and_thin_savings_do_nothing() -> None:
    few = observed(routing((4, 4, 14, 14), 30))
    assert propose(DEMANDS, few, EQUAL, budget_bytes=BUDGET) is None
    assert propose(DEMANDS, UseCounts((N_LAYERS, N_EXPERTS)), EQUAL, budget_bytes=BUDGET) is None
    enough = observed(routing((4, 4, 14, 14), 600))
    for bar in (
        Hysteresis(horizon_steps=1.0),
        Hysteresis(payback=1e6),
        Hysteresis(min_share=1.01),
        Hysteresis(uses_seen=1e6),
    ):
        assert propose(DEMANDS, enough, EQUAL, budget_bytes=BUDGET, hysteresis=bar) is None, bar
    assert propose(DEMANDS, enough, EQUAL, budget_bytes=BUDGET) is not None


def test_floors_hold() -> None:
    proposal = propose(DEMANDS, observed(routing((2, 2, 16, 16), 600)), EQUAL, budget_bytes=BUDGET)
    assert proposal is not None
    assert min(proposal.plan.slots) >= TOP_K
