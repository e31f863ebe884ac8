"""The ledger of a device: its sum, its bounds, what binds, and what its refusals say."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertier.errors import BudgetError
from expertier.planner import LayerDemand, plan_layers
from expertier.planner.budget.allocate import floor_bytes, full_bytes
from expertier.planner.budget.ledger import Consumer, DeviceLedger, DeviceNeeds, plan_device
from expertier.planner.budget.limited_by import LimitedBy
from expertier.units import MIB

DEMANDS = [
    LayerDemand(layer=layer, n_experts=8, top_k=2, slot_bytes=MIB, fixed_bytes=640) for layer in range(4)
]
FLOOR, FULL = floor_bytes(DEMANDS), full_bytes(DEMANDS)
NEEDS = DeviceNeeds(
    free=60 * MIB, weights=10 * MIB, kv=8 * MIB, compute_narrow=1 * MIB, compute_wide=5 * MIB, draft=2 * MIB,
    headroom=4 * MIB, prefill_stream=3 * MIB, peers=1 * MIB, reserve=6 * MIB,
)  # fmt: skip

sizes = st.integers(0, 40 * MIB)
needs = st.builds(
    DeviceNeeds, free=st.integers(0, 400 * MIB), weights=sizes, kv=sizes, compute_narrow=sizes, compute_wide=sizes,
    draft=sizes, headroom=sizes, prefill_stream=sizes, peers=sizes, reserve=sizes,
    taken=st.dictionaries(st.sampled_from([c for c in Consumer if c is not Consumer.ARENA]), sizes, max_size=3),
)  # fmt: skip
bounds = st.none() | st.integers(0, 2 * FULL)


def others(ledger: DeviceLedger) -> int:
    return sum(n_bytes for consumer, n_bytes in ledger.entries.items() if consumer is not Consumer.ARENA)


def test_every_byte_stands_once() -> None:
    ledger = plan_device(NEEDS, DEMANDS)
    assert dict(ledger.entries) == {
        Consumer.WEIGHTS: 10 * MIB,
        Consumer.KV: 8 * MIB,
        Consumer.DRAFT: 2 * MIB,
        Consumer.PREFILL_STREAM: 3 * MIB,
        Consumer.PEERS: 1 * MIB,
        Consumer.HEADROOM: 4 * MIB,
        Consumer.RESERVE: 6 * MIB,
        Consumer.COMPUTE_NARROW: 1 * MIB,
        Consumer.COMPUTE_WIDE: 4 * MIB,  # beyond the narrow one
        Consumer.ARENA: 21 * MIB,
    }
    assert ledger.limited_by is LimitedBy.RESERVE
    assert ledger.slab_bytes == 26 * MIB
    assert ledger.arena_narrow_bytes == 25 * MIB


@given(needs, bounds, bounds)
def test_it_adds_up_or_says_the_smallest_memory_that_works(
    needs: DeviceNeeds, cap: int | None, asked: int | None
) -> None:
    reserved = sum(needs.reserved().values())
    try:
        ledger = plan_device(needs, DEMANDS, cap_bytes=cap, asked_bytes=asked)
    except BudgetError as error:
        room = needs.total - reserved
        too_small = [bound for bound in (cap, asked) if bound is not None and bound < FLOOR]
        assert room < FLOOR or too_small or (asked is not None and min(asked, FULL) > room)
        if room < FLOOR:
            said = re.search(r"give it at least (\d+) MiB", str(error))
            assert said is not None
            more = int(said[1]) * MIB - needs.total
            plan_device(replace(needs, free=needs.free + more), DEMANDS)
            with pytest.raises(BudgetError):
                plan_device(replace(needs, free=needs.free + more - MIB), DEMANDS)
        return
    ledger.check_valid()
    assert sum(ledger.entries.values()) + ledger.unused_bytes == needs.free + sum(needs.taken.values())
    assert others(ledger) == reserved
    assert ledger.arena_bytes <= min(b for b in (cap, asked, FULL) if b is not None)
    assert plan_layers(DEMANDS, budget_bytes=ledger.arena_bytes).used_bytes <= ledger.arena_bytes
    assert ledger.arena_bytes <= ledger.arena_narrow_bytes <= FULL


@given(needs, st.sampled_from(["kv", "weights", "draft"]), sizes)
def test_what_is_allocated_is_not_reserved_again(needs: DeviceNeeds, name: str, taken: int) -> None:
    """A cache of exactly the planned size that moves from planned to allocated changes nothing."""
    consumer = Consumer(name)
    before = replace(needs, taken={}, **{name: taken}, free=needs.free + taken + FLOOR)
    after = replace(before, taken={consumer: taken}, free=before.free - taken, **{name: 7 * taken})
    try:
        expected = plan_device(before, DEMANDS)
    except BudgetError:
        with pytest.raises(BudgetError):
            plan_device(after, DEMANDS)
        return
    found = plan_device(after, DEMANDS)
    assert found.entries == expected.entries
    assert found.total_bytes == expected.total_bytes


@pytest.mark.parametrize(
    ("free", "cap", "asked", "limit", "arena"),
    [
        (60, None, None, LimitedBy.RESERVE, 21 * MIB),
        (60, 20 * MIB, None, LimitedBy.CAP, 20 * MIB),
        (60, 20 * MIB, 19 * MIB, LimitedBy.POOL, 19 * MIB),
        (60, 20 * MIB, 21 * MIB, LimitedBy.CAP, 20 * MIB),
        (99, None, None, LimitedBy.SLOTS, FULL),
        (99, FULL, 2 * FULL, LimitedBy.SLOTS, FULL),
    ],
)
def test_what_binds(free: int, cap: int | None, asked: int | None, limit: LimitedBy, arena: int) -> None:
    ledger = plan_device(replace(NEEDS, free=free * MIB), DEMANDS, cap_bytes=cap, asked_bytes=asked)
    assert (ledger.limited_by, ledger.arena_bytes) == (limit, arena)
    assert (ledger.unused_bytes == 0) == (limit is LimitedBy.RESERVE)


def test_no_admission_of_zero() -> None:
    with pytest.raises(
        BudgetError, match=r"weights \(10\.0 MiB\), kv \(8\.0 MiB\), .* leave 0 MiB|leave 0\.0"
    ) as caught:
        plan_device(replace(NEEDS, free=39 * MIB), DEMANDS)
    assert "give it at least 44 MiB" in str(caught.value)
    with pytest.raises(BudgetError, match=r"MOE_POOL_CAP_MIB to at least 5"):
        plan_device(NEEDS, DEMANDS, cap_bytes=FLOOR - 1)
    with pytest.raises(BudgetError, match=r"MOE_EXPERT_CACHE_MIB to at least 5"):
        plan_device(NEEDS, DEMANDS, asked_bytes=0)
    with pytest.raises(BudgetError, match=r"leave 21\.0 MiB: set MOE_EXPERT_CACHE_MIB to at most 21"):
        plan_device(NEEDS, DEMANDS, asked_bytes=22 * MIB)


def test_a_wide_batch_no_larger_than_a_narrow_one_costs_nothing_more() -> None:
    ledger = plan_device(replace(NEEDS, compute_wide=0), DEMANDS)
    assert ledger.entries[Consumer.COMPUTE_WIDE] == 0
    assert ledger.arena_narrow_bytes == ledger.arena_bytes == 25 * MIB


def test_numbers_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="below 0"):
        DeviceNeeds(free=-1)
    with pytest.raises(ValueError, match="arena"):
        DeviceNeeds(free=1, taken={Consumer.ARENA: 1})


def test_as_one_line() -> None:
    line = plan_device(NEEDS, DEMANDS).line()
    assert line.startswith("60.0 MiB of the device: weights 10.0 MiB, kv 8.0 MiB")
    assert line.endswith("arena 21.0 MiB; limited by reserve")
    assert "peers" not in plan_device(replace(NEEDS, peers=0), DEMANDS).line()


def test_as_json() -> None:
    document = plan_device(NEEDS, DEMANDS).as_dict()
    assert sum(document["entries"].values()) + document["unused_bytes"] == document["total_bytes"]
    assert document["limited_by"] == "reserve"
