"""Plans from a profile: against exhaustive search and an exact dynamic programme, and uniform where it must be."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertier.planner import LayerDemand, plan_layers
from expertier.planner.budget.allocate import floor_bytes
from expertier.planner.budget.allocate_by_profile import marginal_gains, saved_bytes

F64 = npt.NDArray[np.float64]


def value(demands: Sequence[LayerDemand], profile: F64, slots: Sequence[int]) -> float:
    """Bytes saved, counted without the code under test: each layer's most used experts."""
    total = 0.0
    for demand, uses, n in zip(demands, profile, slots, strict=True):
        best = sorted(uses[: demand.n_experts].tolist(), reverse=True)[:n]
        total += demand.slot_bytes * demand.weight * sum(best)
    return total


def cost(demands: Sequence[LayerDemand], slots: Sequence[int]) -> int:
    return sum(demand.bytes_for(n) for demand, n in zip(demands, slots, strict=True))


def exhaustive(demands: Sequence[LayerDemand], profile: F64, floors: Sequence[int], budget: int) -> float:
    """The most that any plan with these floors saves."""
    ranges = [range(floor, demand.n_experts + 1) for demand, floor in zip(demands, floors, strict=True)]
    return max(
        value(demands, profile, slots)
        for slots in itertools.product(*ranges)
        if cost(demands, slots) <= budget
    )


def programme(demands: Sequence[LayerDemand], profile: F64, floors: Sequence[int], budget: int) -> float:
    """The same by a dynamic programme over bytes; exact where all sizes are multiples of `unit`."""
    unit = int(np.gcd.reduce([demand.slot_bytes for demand in demands]))
    room = (budget - sum(demand.fixed_bytes for demand in demands)) // unit
    best = np.full(room + 1, -np.inf)
    best[0] = 0.0
    for demand, uses, floor in zip(demands, profile, floors, strict=True):
        size = demand.slot_bytes // unit
        gains = -np.sort(-uses[: demand.n_experts]) * demand.weight * demand.slot_bytes
        saved = np.concatenate(([0.0], np.cumsum(gains)))
        after = np.full(room + 1, -np.inf)
        for n in range(floor, demand.n_experts + 1):
            if n * size <= room:
                shifted = np.concatenate((np.full(n * size, -np.inf), best[: room + 1 - n * size]))
                after = np.maximum(after, shifted + saved[n])
        best = after
    return float(best.max())


@st.composite
def small_cases(draw: st.DrawFn) -> tuple[list[LayerDemand], F64, int]:
    n_layers = draw(st.integers(1, 3))
    one_size = draw(st.booleans())
    size = draw(st.integers(1, 5))
    demands = [
        LayerDemand(
            layer=layer,
            n_experts=(n_experts := draw(st.integers(1, 5))),
            top_k=draw(st.integers(1, n_experts)),
            slot_bytes=size if one_size else draw(st.integers(1, 5)),
            fixed_bytes=draw(st.integers(0, 3)),
            weight=draw(st.sampled_from([1.0, 1.0, 0.5, 3.0])),
        )
        for layer in range(n_layers)
    ]
    most = max(demand.n_experts for demand in demands)
    uses = draw(st.lists(st.integers(0, 9), min_size=n_layers * most, max_size=n_layers * most))
    profile = np.array(uses, np.float64).reshape(n_layers, most)
    return demands, profile, floor_bytes(demands) + draw(st.integers(0, 60))


def floors_of(demands: Sequence[LayerDemand], budget: int) -> list[int]:
    """top-k slots a layer, or the most equal ones where the budget holds fewer."""
    equal = max(
        n
        for n in range(1, max(demand.n_experts for demand in demands) + 1)
        if cost(demands, [min(n, demand.n_experts) for demand in demands]) <= budget
    )
    return [min(demand.top_k, equal, demand.n_experts) for demand in demands]


@given(small_cases())
def test_nothing_saves_more(case: tuple[list[LayerDemand], F64, int]) -> None:
    demands, profile, budget = case
    plan = plan_layers(demands, budget_bytes=budget, profile=profile)
    floors = floors_of(demands, budget)
    assert plan.used_bytes == cost(demands, plan.slots) <= budget
    for demand, n, floor in zip(demands, plan.slots, floors, strict=True):
        assert floor <= n <= demand.n_experts
    best = exhaustive(demands, profile, floors, budget)
    assert best == pytest.approx(programme(demands, profile, floors, budget)), "the two optima disagree"
    found = value(demands, profile, plan.slots)
    assert found == pytest.approx(saved_bytes(demands, marginal_gains(demands, profile), plan.slots))
    # Where all slots have one size, the plan is the optimum; otherwise one slot may not fit that should.
    sizes = {demand.slot_bytes for demand in demands}
    slack = (
        0.0
        if len(sizes) == 1
        else float((profile.max(axis=1) * [d.slot_bytes * d.weight for d in demands]).max())
    )
    told_apart = plan.slots != plan_layers(demands, budget_bytes=budget).slots
    if told_apart or len(sizes) == 1:
        assert found >= best - slack - 1e-9


@given(small_cases(), st.integers(0, 9))
def test_equal_weights_give_the_uniform_plan(case: tuple[list[LayerDemand], F64, int], uses: int) -> None:
    demands, profile, budget = case
    demands = [
        LayerDemand(
            layer=d.layer, n_experts=d.n_experts, top_k=d.top_k, slot_bytes=d.slot_bytes, fixed_bytes=7
        )
        for d in demands
    ]
    budget += floor_bytes(demands)
    uniform = plan_layers(demands, budget_bytes=budget)
    assert plan_layers(demands, budget_bytes=budget, profile=np.full_like(profile, uses)) == uniform
    if len({demand.n_experts for demand in demands}) == 1:
        alike = np.tile(profile[0], (len(demands), 1))
        assert plan_layers(demands, budget_bytes=budget, profile=alike) == uniform


@pytest.mark.parametrize("seed", range(4))
def test_large_plans_against_the_programme(seed: int) -> None:
    """Skewed layers of mixed quantisation: within one slot's worth of the optimum, and far above uniform."""
    rng = np.random.default_rng(seed)
    demands = [
        LayerDemand(layer=i, n_experts=64, top_k=4, slot_bytes=(4, 5, 6)[i % 3], fixed_bytes=1)
        for i in range(16)
    ]
    profile = rng.zipf(rng.uniform(1.2, 3.0, (16, 1)), (16, 64)).clip(0, 10_000).astype(np.float64)
    budget = 16 + 16 * 20 * 5
    plan = plan_layers(demands, budget_bytes=budget, profile=profile)
    best = programme(demands, profile, [4] * 16, budget)
    found = value(demands, profile, plan.slots)
    missed = value(demands, profile, [64] * 16) - best
    assert best >= found >= best - 0.01 * missed
    assert found > value(demands, profile, plan_layers(demands, budget_bytes=budget).slots)


def test_slots_go_where_routing_is_spread() -> None:
    demands = [
        LayerDemand(layer=layer, n_experts=8, top_k=2, slot_bytes=10, fixed_bytes=0) for layer in range(2)
    ]
    narrow, spread = [50, 50, 0, 0, 0, 0, 0, 0], [12.5] * 8
    plan = plan_layers(demands, budget_bytes=100, profile=np.array([narrow, spread]))
    assert plan.slots == (2, 8)


def test_every_layer_keeps_its_floor() -> None:
    demands = [
        LayerDemand(layer=layer, n_experts=8, top_k=3, slot_bytes=10, fixed_bytes=0) for layer in range(2)
    ]
    profile = np.array([[1, 0, 0, 0, 0, 0, 0, 0], [9] * 8])
    assert plan_layers(demands, budget_bytes=100, profile=profile).slots == (3, 7)
    assert plan_layers(demands, budget_bytes=50, profile=profile).slots == (2, 3), (
        "too little for top-k slots"
    )


def test_a_profile_of_another_model_is_refused() -> None:
    demands = [LayerDemand(layer=0, n_experts=4, top_k=1, slot_bytes=1, fixed_bytes=0)]
    with pytest.raises(ValueError, match=r"\(1, 3\).*\(1, 4\)"):
        plan_layers(demands, budget_bytes=4, profile=np.ones((1, 3)))
    for bad in (-1.0, np.nan, np.inf):
        with pytest.raises(ValueError, match="below 0 or not finite"):
            plan_layers(demands, budget_bytes=4, profile=np.array([[1, bad, 1, 1]]))
