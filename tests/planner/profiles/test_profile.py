"""Profiles: heat in proportion, and the order of a warm start."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from expertier.planner import PolicyKind
from expertier.planner.policy.residency import Residency
from expertier.planner.profiles.profile import beyond_slots, scaled_heat, warm_order
from expertier.testing.unlocked_calls import unlocked

profiles = hnp.arrays(
    np.int64, st.tuples(st.integers(1, 5), st.integers(1, 9)), elements=st.integers(0, 1000)
)


@given(profiles)
def test_heat_is_in_proportion(counts: np.ndarray) -> None:
    heat = scaled_heat(counts)
    for row, hot in zip(counts, heat, strict=True):
        if row.max() == 0:
            assert not hot.any()
            continue
        assert hot[row.argmax()] == 255
        assert np.abs(hot - 255 * row / row.max()).max() <= 0.5


@pytest.mark.parametrize("bad", [-1.0, np.nan, np.inf])
def test_counts_are_numbers(bad: float) -> None:
    with pytest.raises(ValueError, match="negative or not numbers"):
        scaled_heat(np.array([[1.0, bad]]))


@given(profiles, st.data())
def test_warm_order_goes_round_the_layers(counts: np.ndarray, data: st.DataObject) -> None:
    n_slots = data.draw(st.lists(st.integers(1, 9), min_size=len(counts), max_size=len(counts)))
    layers, experts = warm_order(counts, n_slots)
    taken = list(zip(layers.tolist(), experts.tolist(), strict=True))
    assert len(set(taken)) == len(taken)
    places = []
    for i, (layer, _) in enumerate(taken):
        places.append(sum(other == layer for other, _ in taken[:i]))
    assert places == sorted(places), "a layer's second before another's first"
    for layer, row in enumerate(counts):
        mine = [expert for other, expert in taken if other == layer]
        assert len(mine) == min(n_slots[layer], (row > 0).sum())
        assert sorted(row[mine].tolist(), reverse=True) == row[mine].tolist()
        left_out = np.delete(row, mine)
        if mine and len(mine) == n_slots[layer] and len(left_out):
            assert left_out.max() <= row[mine].min()


@given(profiles, st.data())
def test_beyond_the_slots_the_most_used_come_first(counts: np.ndarray, data: st.DataObject) -> None:
    n_slots = data.draw(st.lists(st.integers(1, 9), min_size=len(counts), max_size=len(counts)))
    before = counts.copy()
    first, then = (
        list(zip(*(part.tolist() for part in order(counts, n_slots)), strict=True))
        for order in (warm_order, beyond_slots)
    )
    assert set(first).isdisjoint(then)
    assert len({*first, *then}) == len(first) + len(then) == np.count_nonzero(counts)
    assert sorted(then, key=lambda which: (-counts[which], which)) == then
    assert (counts == before).all()


def test_seeded_heat_decides_who_leaves() -> None:
    residency = Residency([6, 6], [3, 3], PolicyKind.LFU_DECAY)
    slots = np.full(3, -1, np.int32)
    unlocked(residency).begin(0, np.array([0, 1, 2], np.int32), slots, slots.copy())
    unlocked(residency).complete(0, slots)
    unlocked(residency).release(0, slots)
    counts = np.zeros((2, 6))
    counts[0] = [5, 1, 9, 7, 0, 0]
    before = residency.residents(0)
    residency.seed_heat(counts)
    residency.check_valid()
    assert residency.residents(0) == before
    one = np.full(1, -1, np.int32)
    unlocked(residency).begin(0, np.array([4], np.int32), one, one.copy())
    assert residency.experts_evicted_by(0, one) == [1]


def test_a_profile_of_another_model_is_refused() -> None:
    residency = Residency([6, 6], [3, 3], PolicyKind.LFU_DECAY)
    with pytest.raises(ValueError, match=r"\(2, 5\).*\(2, 6\)"):
        residency.seed_heat(np.zeros((2, 5)))
    with pytest.raises(ValueError, match="2 layers of counts and 3 of slots"):
        warm_order(np.zeros((2, 5)), [1, 2, 3])
