"""Layouts that a boundary comes back to: the same ones, as long as the quotas are."""

from __future__ import annotations

import pytest

from expertier.errors import BudgetError
from expertier.hip.host import HostDevice
from expertier.planner.budget.shrink import shrink
from expertier.planner.policy.repack import Survivors
from expertier.testing import LayerShape, synthetic_table
from expertier.tiers.slots.positions import MOST_LAYOUTS, Positions
from expertier.tiers.slots.slab import Slab

TABLE = synthetic_table([LayerShape(n_experts=8), LayerShape(types=("Q4_0", "Q4_0", "Q8_0"), n_experts=12)])
DEMANDS = TABLE.layer_demands()
QUOTAS = (8, 12)
SLAB_BYTES = sum(demand.bytes_for(n) for demand, n in zip(DEMANDS, QUOTAS, strict=True)) // 128 * 128 + 128


@pytest.fixture
def slab() -> Slab:
    slab = Slab(HostDevice(), TABLE.slot_layouts, SLAB_BYTES)
    slab.relayout(slab.plan(QUOTAS, 0), Survivors.none())
    return slab


def test_a_position_is_laid_out_once(slab: Slab) -> None:
    positions = Positions(slab, DEMANDS)
    low, high = (positions.layout(QUOTAS, n_bytes, slab.n_bytes) for n_bytes in (0, 12_800))
    assert low.slots == QUOTAS
    assert high.slots == shrink(QUOTAS, DEMANDS, budget_bytes=slab.n_bytes - 12_800).slots
    assert high.compute_bytes == 12_800
    assert positions.layout(QUOTAS, 0, slab.n_bytes) is low
    assert positions.layout(QUOTAS, 12_800, slab.n_bytes) is high
    assert positions.layout(QUOTAS, 12_800, slab.n_bytes - 128) is not high


def test_other_quotas_are_laid_out_anew(slab: Slab) -> None:
    positions = Positions(slab, DEMANDS)
    first = positions.layout(QUOTAS, 128, slab.n_bytes)
    other = positions.layout((4, 4), 128, slab.n_bytes)
    assert other.slots == (4, 4)
    again = positions.layout(QUOTAS, 128, slab.n_bytes)
    assert again is not first
    assert again.slots == first.slots


def test_only_what_was_used_of_late_is_layouts(slab: Slab) -> None:
    positions = Positions(slab, DEMANDS)
    layouts = [positions.layout(QUOTAS, 128 * i, slab.n_bytes) for i in range(MOST_LAYOUTS)]
    assert positions.layout(QUOTAS, 0, slab.n_bytes) is layouts[0]
    positions.layout(QUOTAS, 128 * MOST_LAYOUTS, slab.n_bytes)
    assert positions.layout(QUOTAS, 0, slab.n_bytes) is layouts[0], "it was used a moment ago"
    assert positions.layout(QUOTAS, 128, slab.n_bytes) is not layouts[1], "nobody had used it for longer"


def test_less_than_a_slot_a_layer_is_refused(slab: Slab) -> None:
    positions = Positions(slab, DEMANDS)
    with pytest.raises(BudgetError, match="one slot in each of 2 layers"):
        positions.layout(QUOTAS, slab.n_bytes - 128, slab.n_bytes)
    assert positions.layout(QUOTAS, 0, slab.n_bytes).slots == QUOTAS
