"""Sizes of one device's tiers, and how wishes are shared out, as pure functions of numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertier.errors import ConfigError
from expertier.planner.budget.allocate import floor_bytes, full_bytes, plan_layers
from expertier.planner.budget.demand import LayerDemand
from expertier.planner.budget.layer_split import BlockNeeds
from expertier.planner.budget.ledger import Consumer, DeviceNeeds
from expertier.planner.budget.limited_by import LimitedBy
from expertier.planner.budget.sizing import (
    HEADROOM_BYTES,
    Experts,
    Wishes,
    device_ledger,
    host_pool,
    size_tiers,
    slab_slots,
    with_kept_free,
)
from expertier.planner.budget.sizing_split import (
    devices_with_room,
    fits_on_one,
    room_for_blocks,
    split_blocks,
    wishes_by_layers,
    wishes_by_shards,
)

DEMANDS = [LayerDemand(layer=n, n_experts=8, top_k=2, slot_bytes=100 + n, fixed_bytes=10) for n in range(4)]
FLOOR, FULL = floor_bytes(DEMANDS), full_bytes(DEMANDS)
EXPERTS = Experts(DEMANDS, 1000)


def test_headroom_and_reserve() -> None:
    auto = with_kept_free(DeviceNeeds(0, headroom=1, reserve=1), Wishes())
    assert auto.reserved()[Consumer.HEADROOM] == HEADROOM_BYTES
    ours = with_kept_free(DeviceNeeds(0), Wishes(headroom_bytes=0, reserve_bytes=7))
    assert sum(ours.reserved().values()) == 7


def pool(wishes: Wishes, *, available_bytes: int, holds_all: bool = False, own: bool = True) -> tuple:
    found = host_pool(
        EXPERTS, wishes, available_bytes=available_bytes, holds_all=holds_all, has_own_memory=own
    )
    return found.budget_bytes, found.limited_by


def test_the_host_pool_and_what_binds_it() -> None:
    assert pool(Wishes(share=0.5), available_bytes=9999) == (500, LimitedBy.POOL)
    assert pool(Wishes(share=1.0), available_bytes=9999) == (1000, LimitedBy.SLOTS)
    assert pool(Wishes(share=1.0), available_bytes=999) == (499, LimitedBy.RAM)
    assert pool(Wishes(), available_bytes=9999, own=False) == (0, LimitedBy.POOL)
    assert pool(Wishes(), available_bytes=9999, holds_all=True) == (0, LimitedBy.SLOTS)
    for holds_all, own in ((True, True), (False, False)):
        asked = Wishes(pool_bytes=700)
        assert pool(asked, available_bytes=1, holds_all=holds_all, own=own) == (700, LimitedBy.POOL)
    assert pool(Wishes(pool_bytes=1000), available_bytes=1) == (1000, LimitedBy.SLOTS)


@given(st.integers(FLOOR, 2 * FULL), st.none() | st.integers(FLOOR, 2 * FULL), st.integers(0, 400))
def test_the_arena_of_a_ledger_is_the_one_of_the_tiers(free: int, cap: int | None, kept: int) -> None:
    wishes = Wishes(cap_bytes=cap, headroom_bytes=kept, reserve_bytes=kept)
    needs = DeviceNeeds(free + 2 * kept + 50, weights=50)
    sizes = size_tiers(EXPERTS, wishes, available_bytes=0, needs=needs)
    assert sizes.ledger == device_ledger(EXPERTS, wishes, needs)
    assert sizes.arena_bytes == min(free, FULL, FULL if cap is None else cap)
    assert fits_on_one(needs, DEMANDS, wishes) == (free >= min(FULL, FULL if cap is None else cap))
    assert room_for_blocks(needs, wishes) == free + 50


def test_slots_of_a_slab_give_way_to_what_computes_in_it() -> None:
    alone = slab_slots(DEMANDS, arena_bytes=FULL // 2)
    assert alone.quotas == alone.wide == alone.narrow == plan_layers(DEMANDS, budget_bytes=FULL // 2)
    found = slab_slots(
        DEMANDS, arena_bytes=FULL // 2, wide_bytes=FULL // 4, narrow_bytes=FULL // 8, alignment=8
    )
    assert found.wide.used_bytes <= FULL // 2 < found.narrow.used_bytes <= FULL // 2 + FULL // 8 + 8
    assert all(
        wide <= narrow <= quota
        for wide, narrow, quota in zip(found.wide.slots, found.narrow.slots, found.quotas.slots, strict=True)
    )


def test_a_ledger_without_compute_in_the_slab_never_gets_more_slots() -> None:
    needs = DeviceNeeds(FLOOR + 500, compute_narrow=100, compute_wide=300)
    wishes = Wishes(headroom_bytes=0)
    grows = device_ledger(EXPERTS, wishes, needs)
    apart = device_ledger(EXPERTS, wishes, needs, computes_in_slab=False)
    assert grows.arena_narrow_bytes == grows.arena_bytes + 200
    assert apart.arena_bytes == apart.arena_narrow_bytes == apart.slab_bytes == grows.arena_bytes


def test_wishes_for_layers_are_those_of_one_plan() -> None:
    layers, copies = [(0,), (1, 2, 3)], [300, 700]
    wishes = Wishes(arena_bytes=FULL // 2, cap_bytes=2 * FULL, pool_bytes=999)
    slots = plan_layers(DEMANDS, budget_bytes=FULL // 2).slots
    first, second = wishes_by_layers(wishes, DEMANDS, layers, copies)
    assert first.arena_bytes == DEMANDS[0].bytes_for(slots[0])
    assert (first.pool_bytes, second.pool_bytes) == (299, 699)
    assert (first.cap_bytes or 0) + (second.cap_bytes or 0) == FULL
    assert wishes_by_layers(Wishes(), DEMANDS, layers, copies) == [Wishes(), Wishes()]


def test_wishes_for_shards_are_the_same_slots_everywhere() -> None:
    halves = [[replace(demand, slot_bytes=50) for demand in DEMANDS] for _ in range(2)]
    for wishes in wishes_by_shards(Wishes(arena_bytes=2 * 4 * (3 * 50 + 10)), halves, [1, 1]):
        assert wishes.arena_bytes == 4 * (3 * 50 + 10)
    assert wishes_by_shards(Wishes(), halves, [1, 1]) == [Wishes(), Wishes()]


def test_devices_for_blocks() -> None:
    blocks = [BlockNeeds(5, demand) for demand in DEMANDS]
    assert devices_with_room([115, 114, 999], blocks) == [0, 2]
    assert devices_with_room([3, 4], blocks) == [1], "the roomiest is kept"
    names = ("one", "two")
    assert split_blocks(blocks, 0, names=names, rooms=(), shares=(1, 1)) == (3, 2)
    with pytest.raises(ConfigError, match=r"two would have 1 of 5 layers, and none with experts"):
        split_blocks(blocks, 0, names=names, rooms=(), shares=(3, 1))
    with pytest.raises(ConfigError, match="3 shares for 2 devices"):
        split_blocks(blocks, 0, names=names, rooms=(), shares=(1, 1, 1))
    assert sum(split_blocks(blocks, 0, names=names, rooms=(500, 500))) == 5
