"""The policy's calls: what each returns, what it changes, and that a refusal changes nothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from expertier.planner import Outcome, PolicyKind
from expertier.planner.policy.residency import Residency
from expertier.testing.unlocked_calls import unlocked
from policy_runs.residency_arrays import ARRAYS

I32 = npt.NDArray[np.int32]


class Layer:
    """One layer of a residency, with lists in and out."""

    def __init__(self, n_experts: int, n_slots: int, kind: PolicyKind = PolicyKind.LFU_DECAY) -> None:
        # A layer before and one after it show that a call stays within its own.
        self.residency = Residency([5, n_experts, 3], [2, n_slots, 3], kind)

    def begin(self, experts: Sequence[int]) -> tuple[int, list[int], list[int]]:
        slots = np.full(len(experts), -1, np.int32)
        miss_index = np.full(len(experts), -1, np.int32)
        status = unlocked(self.residency).begin(1, np.array(experts, np.int32), slots, miss_index)
        return status, slots.tolist(), miss_index[: max(status, 0)].tolist()

    def use(self, experts: Sequence[int]) -> list[int]:
        """Take, fill and release; returns the slots."""
        status, slots, _ = self.begin(experts)
        assert status >= 0
        self.complete(slots)
        assert self.release(slots) == 0
        self.residency.check_valid()
        return slots

    def complete(self, slots: Sequence[int]) -> int:
        return unlocked(self.residency).complete(1, np.array(slots, np.int32))

    def abort(self, slots: Sequence[int]) -> int:
        return unlocked(self.residency).abort(1, np.array(slots, np.int32))

    def release(self, slots: Sequence[int]) -> int:
        return unlocked(self.residency).release(1, np.array(slots, np.int32))

    @property
    def residents(self) -> set[int]:
        return set(self.residency.residents(1))

    def arrays(self) -> list[npt.NDArray[np.generic]]:
        return [getattr(self.residency, name).copy() for name in ARRAYS]

    def assert_unchanged(self, before: list[npt.NDArray[np.generic]]) -> None:
        for name, old, new in zip(ARRAYS, before, self.arrays(), strict=True):
            assert np.array_equal(old, new), name


def test_misses_fill_free_slots_and_hits_find_them() -> None:
    layer = Layer(8, 4)
    status, slots, misses = layer.begin([3, 5])
    assert (status, slots, misses) == (2, [0, 1], [0, 1])
    assert layer.residents == set(), "an unfinished copy is no resident"
    assert layer.complete(slots) == 2
    assert layer.release(slots) == 0
    status, slots, misses = layer.begin([7, 5, 3])
    assert (status, slots, misses) == (1, [2, 1, 0], [0])
    layer.residency.check_valid()


def test_lru_evicts_what_was_used_longest_ago() -> None:
    layer = Layer(8, 3, PolicyKind.LRU)
    for _ in range(5):
        layer.use([0])
    layer.use([1])
    layer.use([2])
    layer.use([3])
    assert layer.residents == {1, 2, 3}


def test_lfu_keeps_what_is_used_often_and_breaks_ties_by_recency() -> None:
    layer = Layer(8, 3)
    layer.use([0])
    layer.use([0])
    layer.use([1])
    layer.use([2])
    layer.use([3])
    assert layer.residents == {0, 2, 3}


def test_heat_survives_eviction() -> None:
    layer = Layer(8, 2)
    for _ in range(4):
        layer.use([0, 1])
    layer.use([2])  # evicts 0 or 1, both hotter than 2 will be
    evicted = ({0, 1} - layer.residents).pop()
    layer.use([evicted])
    assert layer.residents == {0, 1}


def test_heat_halves_every_twenty_steps_of_the_layer_and_saturates() -> None:
    layer = Layer(8, 4)
    heat = layer.residency.heat[1]
    for _ in range(19):
        layer.use([0])
    assert heat[0] == 255
    layer.use([1])
    assert (heat[0], heat[1]) == (127, 16)
    assert layer.residency.totals()["calls"] == 20


def test_begin_never_evicts_its_own_hits_or_what_others_hold() -> None:
    layer = Layer(8, 3, PolicyKind.LRU)
    layer.use([0, 1, 2])
    _, held, _ = layer.begin([0])
    status, slots, _ = layer.begin([1, 5])  # 1 is a hit and 0 is pinned: only 2 may go
    assert status == 1
    layer.complete(slots)
    assert layer.residents == {0, 1, 5}
    assert layer.release(held) == 0
    assert layer.release(slots) == 0


def test_evicted_names_the_former_owner() -> None:
    layer = Layer(8, 2, PolicyKind.LRU)
    layer.use([0, 1])
    _, slots, _ = layer.begin([4])
    assert layer.residency.experts_evicted_by(1, np.array(slots, np.int32)) == [0]
    layer.abort(slots)
    _, slots, _ = layer.begin([5])  # the slot is free now
    assert layer.residency.experts_evicted_by(1, np.array(slots, np.int32)) == []


def test_abort_frees_what_was_missing_and_unpins_the_rest() -> None:
    layer = Layer(8, 3)
    layer.use([0, 1])
    _, slots, _ = layer.begin([1, 6])
    assert layer.abort(slots) == 0
    assert layer.residents == {0, 1}
    assert layer.residency.pins_of(1) == [0, 0, 0]
    layer.residency.check_valid()
    assert layer.begin([6])[0] == 1


@pytest.mark.parametrize(
    ("experts", "outcome"),
    [
        ([6], Outcome.BUSY),  # being filled
        ([6, 0], Outcome.BUSY),
        ([1, 2], Outcome.BUSY),  # only one slot is unpinned
        ([0, 1, 2, 3], Outcome.TOO_MANY),
        ([8], Outcome.BAD_EXPERT),
        ([-1], Outcome.BAD_EXPERT),
        ([0, 6, 8], Outcome.BAD_EXPERT),
    ],
)
def test_a_refusal_changes_nothing(experts: list[int], outcome: Outcome) -> None:
    layer = Layer(8, 3)
    layer.use([0])
    layer.begin([5])
    layer.begin([6])
    before = layer.arrays()
    assert layer.begin(experts) == (outcome, [-1] * len(experts), [])
    layer.assert_unchanged(before)


def test_enough_unpinned_slots_are_enough() -> None:
    layer = Layer(8, 4)
    layer.use([0, 1, 2, 3])
    _, held, _ = layer.begin([0, 1])
    assert layer.begin([0, 1, 6, 7])[0] == 2, "hits that are pinned already need no slot"
    assert layer.begin([2])[0] == Outcome.BUSY
    assert layer.release(held) == 0


def test_a_call_does_not_count_on_the_slots_of_its_own_hits() -> None:
    layer = Layer(8, 3)
    layer.use([0, 1, 2])
    _, held, _ = layer.begin([2])
    before = layer.arrays()
    assert layer.begin([0, 1, 5])[0] == Outcome.BUSY
    layer.assert_unchanged(before)
    assert layer.release(held) == 0
    assert layer.begin([0, 1, 5])[0] == 1


def test_an_empty_call_changes_nothing() -> None:
    layer = Layer(8, 3)
    before = layer.arrays()
    assert layer.begin([]) == (0, [], [])
    assert (layer.complete([]), layer.release([])) == (0, 0)
    layer.assert_unchanged(before)


def test_an_expert_named_twice_gets_one_slot() -> None:
    layer = Layer(8, 3)
    status, slots, misses = layer.begin([4, 4])
    assert (status, slots, misses) == (1, [0, 0], [0])
    layer.complete(slots)
    assert layer.residency.pins_of(1) == [2, 0, 0]
    assert layer.release(slots) == 0
    layer.residency.check_valid()


@pytest.mark.parametrize("slots", [[0, 0], [2], [3], [-1], [0, 1]])
def test_release_of_what_is_not_pinned_is_refused_whole(slots: list[int]) -> None:
    layer = Layer(8, 3)
    layer.use([0, 1, 2])
    layer.begin([0])
    before = layer.arrays()
    assert layer.release(slots) == Outcome.BAD_CALL
    assert layer.abort(slots) == Outcome.BAD_CALL
    layer.assert_unchanged(before)


@pytest.mark.parametrize("number", [-1, 3])
def test_a_layer_that_is_not_there_is_refused(number: int) -> None:
    residency = Layer(8, 3).residency
    one = np.zeros(1, np.int32)
    assert unlocked(residency).begin(number, one, one.copy(), one.copy()) == Outcome.BAD_CALL
    assert unlocked(residency).complete(number, one) == Outcome.BAD_CALL
    assert unlocked(residency).release(number, one) == Outcome.BAD_CALL
    assert unlocked(residency).abort(number, one) == Outcome.BAD_CALL
    assert unlocked(residency).resident_first(number, one) == Outcome.BAD_CALL


def test_resident_first_is_a_stable_partition() -> None:
    layer = Layer(8, 3)
    layer.use([6, 1])
    layer.begin([4])
    experts = np.array([0, 1, 2, 4, 5, 6, 7], np.int32)
    assert unlocked(layer.residency).resident_first(1, experts) == 3
    assert experts.tolist() == [1, 4, 6, 0, 2, 5, 7]
    bad = np.array([1, 8], np.int32)
    assert unlocked(layer.residency).resident_first(1, bad) == Outcome.BAD_EXPERT
    assert bad.tolist() == [1, 8]


def test_counters_add_up() -> None:
    layer = Layer(8, 2)
    layer.use([0, 1])
    layer.use([0, 2])
    _, slots, _ = layer.begin([5])
    layer.abort(slots)
    assert dict(layer.residency.totals()) == {
        "calls": 3,
        "hits": 1,
        "misses": 4,
        "evictions": 2,
        "fills": 3,
        "aborts": 1,
        "prefetches": 0,
        "prefetches_useful": 0,
        "prefetches_wasted": 0,
    }


def test_resize_empties_the_slots_and_keeps_the_counts() -> None:
    layer = Layer(8, 3)
    layer.use([0, 1])
    heat = layer.residency.heat.copy()
    layer.residency.resize([1, 4, 2])
    layer.residency.check_valid()
    assert layer.residents == set()
    assert layer.residency.totals()["evictions"] == 2
    assert np.array_equal(heat, layer.residency.heat)
    assert layer.use([0, 1, 2, 3]) == [0, 1, 2, 3]


@pytest.mark.parametrize(("experts", "slots"), [([], []), ([1], []), ([1, 0], [1, 1]), ([1, 1], [1, 0])])
def test_every_layer_needs_an_expert_and_a_slot(experts: list[int], slots: list[int]) -> None:
    with pytest.raises(ValueError, match="layer"):
        Residency(experts, slots, PolicyKind.LRU)
