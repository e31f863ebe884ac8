"""Plans: equal slots, what is left over, the floor, and that they never exceed the budget."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertier.errors import BudgetError
from expertier.planner import LayerDemand, plan_layers
from expertier.planner.budget.allocate import floor_bytes, full_bytes
from expertier.units import MIB


def demand(layer: int, n_experts: int = 8, slot_bytes: int = 100, fixed_bytes: int = 7) -> LayerDemand:
    return LayerDemand(
        layer=layer, n_experts=n_experts, top_k=1, slot_bytes=slot_bytes, fixed_bytes=fixed_bytes
    )


def test_slots_are_equal_and_the_rest_goes_to_the_first_layers_that_it_fits() -> None:
    demands = [demand(0), demand(1, slot_bytes=300), demand(2)]
    three_each = sum(d.bytes_for(3) for d in demands)
    assert plan_layers(demands, budget_bytes=three_each).slots == (3, 3, 3)
    assert plan_layers(demands, budget_bytes=three_each + 99).slots == (3, 3, 3)
    assert plan_layers(demands, budget_bytes=three_each + 100).slots == (4, 3, 3)
    assert plan_layers(demands, budget_bytes=three_each + 399).slots == (4, 3, 4)


def test_no_layer_gets_more_slots_than_experts() -> None:
    demands = [demand(0, n_experts=2), demand(1, n_experts=5)]
    plan = plan_layers(demands, budget_bytes=10**9)
    assert plan.slots == (2, 5)
    assert plan.used_bytes == full_bytes(demands)


def test_below_one_slot_a_layer_says_what_works() -> None:
    demands = [demand(layer, slot_bytes=MIB) for layer in range(3)]
    floor = floor_bytes(demands)
    assert plan_layers(demands, budget_bytes=floor).slots == (1, 1, 1)
    with pytest.raises(
        BudgetError, match=r"asked for 2\.\d+ MiB .* 3 layers takes 3\.0 MiB: give at least 4 MiB"
    ):
        plan_layers(demands, budget_bytes=floor - MIB // 4)
    assert plan_layers(demands, budget_bytes=4 * MIB)


@pytest.mark.parametrize("layers", [[], [1], [0, 2], [1, 0]])
def test_demands_must_describe_every_layer_in_order(layers: list[int]) -> None:
    with pytest.raises(ValueError, match="in order"):
        plan_layers([demand(layer) for layer in layers], budget_bytes=10**6)


@pytest.mark.parametrize(
    "change",
    [
        {"layer": -1},
        {"n_experts": 0},
        {"top_k": 0},
        {"top_k": 9},
        {"slot_bytes": 0},
        {"fixed_bytes": -1},
        {"weight": -1.0},
    ],
)
def test_a_demand_describes_a_layer(change: dict[str, int]) -> None:
    good = {"layer": 0, "n_experts": 8, "top_k": 2, "slot_bytes": 1, "fixed_bytes": 0}
    LayerDemand(**good)
    with pytest.raises(ValueError, match="LayerDemand"):
        LayerDemand(**good | change)


@given(
    st.lists(
        st.tuples(st.integers(1, 64), st.integers(1, 10**6), st.integers(0, 1000)), min_size=1, max_size=12
    ),
    st.integers(0, 10**9),
)
def test_plans_fit_and_waste_less_than_a_slot(layers: list[tuple[int, int, int]], extra: int) -> None:
    demands = [
        LayerDemand(layer=i, n_experts=n, top_k=1, slot_bytes=size, fixed_bytes=fixed)
        for i, (n, size, fixed) in enumerate(layers)
    ]
    plan = plan_layers(demands, budget_bytes=floor_bytes(demands) + extra)
    assert plan.used_bytes == sum(d.bytes_for(n) for d, n in zip(demands, plan.slots, strict=True))
    assert plan.used_bytes <= plan.budget_bytes
    open_layers = [d for d, n in zip(demands, plan.slots, strict=True) if n < d.n_experts]
    most = max(plan.slots)
    for d, n in zip(demands, plan.slots, strict=True):
        assert 1 <= n <= d.n_experts
        assert n >= min(most - 1, d.n_experts), "slots differ by more than the left-over one"
    if open_layers:
        left = plan.budget_bytes - plan.used_bytes
        assert left < sum(d.slot_bytes for d in open_layers), "another slot a layer would have fitted"
