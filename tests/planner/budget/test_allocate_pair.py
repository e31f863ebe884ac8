"""Plans for both places of the boundary: nested, within their budgets, and moving no more than they must."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertier.errors import BudgetError
from expertier.planner import LayerDemand, plan_layers
from expertier.planner.budget.allocate import floor_bytes, full_bytes
from expertier.planner.budget.allocate_by_profile import marginal_gains, saved_bytes
from expertier.planner.budget.allocate_pair import plan_pair


def layers(n: int = 6, sizes: tuple[int, ...] = (10,)) -> list[LayerDemand]:
    return [
        LayerDemand(layer=i, n_experts=16, top_k=2, slot_bytes=sizes[i % len(sizes)], fixed_bytes=3)
        for i in range(n)
    ]


@given(st.integers(0, 2000), st.integers(0, 2000), st.booleans(), st.integers(0, 5), st.booleans())
def test_nested_and_within_both_budgets(a: int, b: int, mixed: bool, seed: int, with_profile: bool) -> None:
    demands = layers(sizes=(10, 14, 21) if mixed else (10,))
    floor = floor_bytes(demands)
    wide, narrow = floor + min(a, b), floor + max(a, b)
    profile = np.random.default_rng(seed).zipf(1.5, (6, 16)).clip(0, 1000) if with_profile else None
    pair = plan_pair(demands, narrow, wide, profile)
    assert pair.narrow == plan_layers(demands, budget_bytes=narrow, profile=profile)
    assert pair.wide.used_bytes <= wide
    assert all(0 < w <= n for w, n in zip(pair.wide.slots, pair.narrow.slots, strict=True))
    dropped = pair.narrow.used_bytes - pair.wide.used_bytes
    assert pair.move_bytes == dropped
    largest = max(demand.slot_bytes for demand in demands)
    if pair.move_bytes and min(pair.wide.slots) > 2:
        assert dropped < narrow - wide + len(demands) * largest, "only what the budgets differ by moves"


@given(st.integers(0, 1200), st.integers(0, 5))
def test_the_wide_plan_is_as_good_as_one_of_its_own(extra: int, seed: int) -> None:
    """With slots of one size, dropping from the narrow plan loses nothing against planning anew."""
    demands = layers()
    profile = np.random.default_rng(seed).zipf(1.6, (6, 16)).clip(0, 1000).astype(float)
    wide = floor_bytes(demands) + 80 + extra // 2
    narrow = wide + extra // 2
    pair = plan_pair(demands, narrow, wide, profile)
    alone = plan_layers(demands, budget_bytes=wide, profile=profile)
    gains = marginal_gains(demands, profile)
    assert saved_bytes(demands, gains, pair.wide.slots) == pytest.approx(
        saved_bytes(demands, gains, alone.slots)
    )


def test_equal_budgets_are_one_plan() -> None:
    demands = layers()
    pair = plan_pair(demands, 500, 500)
    assert pair.wide.slots == pair.narrow.slots
    assert pair.move_bytes == 0
    full = full_bytes(demands)
    assert set(plan_pair(demands, full, full).wide.slots) == {16}


def test_budgets_that_make_no_sense() -> None:
    demands = layers()
    with pytest.raises(ValueError, match="wide boundary"):
        plan_pair(demands, 400, 401)
    with pytest.raises(BudgetError, match="one slot in each"):
        plan_pair(demands, 400, floor_bytes(demands) - 1)
