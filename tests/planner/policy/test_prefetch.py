"""Prefetches: where they go, that they count as no use, and what they were good for."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from expertier.planner import Outcome, PolicyKind
from expertier.planner.policy.repack import Survivors
from expertier.planner.policy.residency import Residency
from expertier.testing.unlocked_calls import unlocked

I32 = npt.NDArray[np.int32]


def make(n_slots: int = 3, kind: PolicyKind = PolicyKind.LFU_DECAY) -> Residency:
    return Residency([8, 8], [n_slots, 2], kind)


def array(*numbers: int) -> I32:
    return np.array(numbers, np.int32)


def use(residency: Residency, *experts: int) -> int:
    """Take, fill and release; returns the misses."""
    slots = np.full(len(experts), -1, np.int32)
    misses = unlocked(residency).begin(0, array(*experts), slots, slots.copy())
    assert misses >= 0
    unlocked(residency).complete(0, slots)
    assert unlocked(residency).release(0, slots) == 0
    residency.check_valid()
    return misses


def prefetch(residency: Residency, expert: int) -> int:
    """Prefetch to the end; returns the slot."""
    slot = unlocked(residency).begin_prefetch(0, expert)
    assert slot >= 0
    residency.check_valid()
    assert unlocked(residency).complete(0, array(slot)) == 1
    assert unlocked(residency).release(0, array(slot)) == 0
    residency.check_valid()
    return slot


def ended(residency: Residency) -> tuple[int, int, int]:
    totals = residency.totals()
    return totals["prefetches"], totals["prefetches_useful"], totals["prefetches_wasted"]


def test_a_prefetch_fills_a_free_slot_and_its_first_hit_makes_it_useful() -> None:
    residency = make()
    prefetch(residency, 5)
    assert set(residency.residents(0)) == {5}
    assert ended(residency) == (1, 0, 0)
    assert use(residency, 5) == 0
    assert ended(residency) == (1, 1, 0)
    assert use(residency, 5) == 0
    assert ended(residency) == (1, 1, 0), "only the first hit counts"
    totals = residency.totals()
    assert (totals["hits"], totals["misses"], totals["calls"], totals["fills"]) == (2, 0, 2, 1)


def test_a_prefetch_is_no_use() -> None:
    residency = make()
    residency.heat[0, 5] = 9
    prefetch(residency, 5)
    assert residency.heat[0, 5] == 9
    assert residency.totals()["calls"] == residency.totals()["misses"] == 0


@pytest.mark.parametrize("kind", list(PolicyKind))
def test_what_nobody_asked_for_leaves_first(kind: PolicyKind) -> None:
    residency = make(3, kind)
    for _ in range(10):
        use(residency, 5)  # heat that the prefetched copy must not get
    residency.repack([3, 2], Survivors.none())
    prefetch(residency, 5)
    use(residency, 0, 1)
    use(residency, 2)
    assert set(residency.residents(0)) == {0, 1, 2}
    assert ended(residency) == (1, 0, 1)


@pytest.mark.parametrize("kind", list(PolicyKind))
def test_prefetches_displace_each_other_and_not_what_is_used(kind: PolicyKind) -> None:
    residency = make(3, kind)
    use(residency, 0, 1, 2)
    prefetch(residency, 3)  # takes the coldest
    kept = set(residency.residents(0)) - {3}
    for expert in (4, 5, 6):
        prefetch(residency, expert)
    assert set(residency.residents(0)) == kept | {6}
    assert ended(residency) == (4, 0, 3)


def test_a_free_slot_goes_before_a_speculative_one() -> None:
    residency = make()
    prefetch(residency, 5)
    use(residency, 0)
    prefetch(residency, 6)
    assert set(residency.residents(0)) == {0, 5, 6}


def test_outcomes_of_a_prefetch() -> None:
    residency = make()
    use(residency, 0)
    slot = unlocked(residency).begin_prefetch(0, 1)
    before = {name: getattr(residency, name).copy() for name in ("owner", "order", "pins", "counters")}
    assert unlocked(residency).begin_prefetch(0, 0) == Outcome.PRESENT, "READY"
    assert unlocked(residency).begin_prefetch(0, 1) == Outcome.PRESENT, "FILLING"
    assert (
        unlocked(residency).begin_prefetch(0, 8)
        == unlocked(residency).begin_prefetch(0, -1)
        == Outcome.BAD_EXPERT
    )
    assert (
        unlocked(residency).begin_prefetch(2, 0)
        == unlocked(residency).begin_prefetch(-1, 0)
        == Outcome.BAD_CALL
    )
    for name, value in before.items():
        assert np.array_equal(getattr(residency, name), value), name
    slots = array(-1, -1)
    assert unlocked(residency).begin(0, array(2, 3), slots, slots.copy()) == 2
    assert unlocked(residency).begin_prefetch(0, 4) == Outcome.BUSY, "every slot is pinned"
    assert unlocked(residency).begin(0, array(1), array(-1), array(0)) == Outcome.BUSY, "it is on its way"
    unlocked(residency).abort(0, array(slot))
    assert unlocked(residency).begin_prefetch(0, 4) == slot


def test_a_prefetch_that_fails_leaves_nothing() -> None:
    residency = make()
    slot = unlocked(residency).begin_prefetch(0, 1)
    assert unlocked(residency).abort(0, array(slot)) == 0
    residency.check_valid()
    assert ended(residency) == (0, 0, 0)
    assert residency.residents(0) == {}
    assert use(residency, 1) == 1
    assert ended(residency) == (0, 0, 0), "the slot's next owner was asked for"


def test_a_demand_hit_on_a_pinned_prefetch_is_a_use() -> None:
    residency = make()
    slot = unlocked(residency).begin_prefetch(0, 1)
    unlocked(residency).complete(0, array(slot))  # not released yet
    assert use(residency, 1) == 0
    assert ended(residency) == (1, 1, 0)
    assert unlocked(residency).release(0, array(slot)) == 0
    residency.check_valid()


def test_what_a_repack_drops_unused_is_wasted() -> None:
    residency = make()
    prefetch(residency, 1)
    use(residency, 0)
    residency.resize([2, 2])
    residency.check_valid()
    assert ended(residency) == (1, 0, 1)
