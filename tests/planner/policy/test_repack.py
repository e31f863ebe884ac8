"""Repacking: who survives, that slots keep their order and their place, and that the tables stay whole."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertier.planner import PolicyKind
from expertier.planner.policy.repack import Survivors, choose_survivors
from expertier.planner.policy.residency import Residency
from expertier.testing.unlocked_calls import unlocked

N_EXPERTS = (12, 5, 9)


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """Where nothing is compiled yet, that takes longer than an example may."""
    for kind in PolicyKind:
        Residency([2], [1], kind)


@st.composite
def used_residencies(draw: st.DrawFn) -> Residency:
    """Tables after some use, with prefetches and failed fills, and nothing pinned."""
    kind = draw(st.sampled_from(list(PolicyKind)))
    n_slots = [draw(st.integers(1, 7)) for _ in N_EXPERTS]
    residency = Residency(N_EXPERTS, n_slots, kind)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    for _ in range(draw(st.integers(0, 40))):
        layer = int(rng.integers(len(N_EXPERTS)))
        if rng.random() < 0.2:
            slot = unlocked(residency).begin_prefetch(layer, int(rng.integers(N_EXPERTS[layer])))
            slots = np.array([slot], np.int32)
        else:
            n = int(rng.integers(1, n_slots[layer] + 1))
            experts = rng.permutation(N_EXPERTS[layer])[:n].astype(np.int32)
            slots = np.full(len(experts), -1, np.int32)
            slot = unlocked(residency).begin(layer, experts, slots, slots.copy())
        if slot < 0:
            continue
        if rng.random() < 0.15:
            unlocked(residency).abort(layer, slots)
        else:
            unlocked(residency).complete(layer, slots)
            unlocked(residency).release(layer, slots)
    residency.check_valid()
    return residency


new_sizes = st.tuples(*(st.integers(1, 9) for _ in N_EXPERTS))
shift_lists = st.tuples(*(st.none() | st.integers(-9, 9) for _ in N_EXPERTS))


def eviction_order(residency: Residency, layer: int) -> list[int]:
    """Experts in the order in which demand would push them out, found by pushing."""
    low = int(residency.first[layer])
    order = residency.order[low : low + int(residency.n_slots[layer])]
    return [
        int(residency.owner[low + slot]) for slot in np.argsort(order) if residency.owner[low + slot] >= 0
    ]


@given(used_residencies(), new_sizes, shift_lists)
def test_the_hottest_survive_in_order(
    residency: Residency, n_slots: tuple[int, ...], shifts: tuple[int | None, ...]
) -> None:
    survivors = choose_survivors(residency, n_slots, shifts)
    for layer, n_new in enumerate(n_slots):
        mine = survivors.layer == layer
        old, new = survivors.old_slot[mine], survivors.new_slot[mine]
        residents = residency.residents(layer)
        assert len(old) == min(len(residents), n_new)
        assert set(survivors.expert[mine].tolist()) == set(
            eviction_order(residency, layer)[len(residents) - len(old) :]
        )
        assert [residents[e] for e in survivors.expert[mine].tolist()] == old.tolist()
        assert (np.diff(old) > 0).all()
        assert (np.diff(new) > 0).all()
        assert ((new >= 0) & (new < n_new)).all()


@given(used_residencies(), new_sizes, shift_lists)
def test_nothing_moves_that_need_not(
    residency: Residency, n_slots: tuple[int, ...], shifts: tuple[int | None, ...]
) -> None:
    survivors = choose_survivors(residency, n_slots, shifts)
    for layer, (n_new, shift) in enumerate(zip(n_slots, shifts, strict=True)):
        mine = survivors.layer == layer
        old, new = survivors.old_slot[mine], survivors.new_slot[mine]
        if shift is None:
            assert new.tolist() == list(range(len(new)))
            continue
        in_place = old - shift
        fits = (in_place >= 0) & (in_place < n_new)
        if fits.all():
            assert np.array_equal(new, in_place)
        # One that fits moves only where its neighbours above or below leave it no room.
        for k in np.flatnonzero(fits & (new != in_place)).tolist():
            crowded_above = k + 1 < len(new) and new[k] == new[k + 1] - 1
            crowded_below = new[k] == k
            assert crowded_above or crowded_below


@given(used_residencies(), new_sizes, shift_lists)
def test_tables_after_a_repack(
    residency: Residency, n_slots: tuple[int, ...], shifts: tuple[int | None, ...]
) -> None:
    before = residency.totals()
    heat = residency.heat.copy()
    orders = [eviction_order(residency, layer) for layer in range(len(N_EXPERTS))]
    n_before = sum(map(len, orders))
    unused = residency.totals()["prefetches"] - sum(
        residency.totals()[name] for name in ("prefetches_useful", "prefetches_wasted")
    )
    survivors = choose_survivors(residency, n_slots, shifts)
    residency.repack(n_slots, survivors)
    residency.check_valid()
    after = residency.totals()
    assert after["evictions"] - before["evictions"] == n_before - len(survivors.expert)
    assert 0 <= after["prefetches_wasted"] - before["prefetches_wasted"] <= unused
    for name in ("calls", "hits", "misses", "fills", "aborts", "prefetches", "prefetches_useful"):
        assert after[name] == before[name], name
    assert np.array_equal(residency.heat, heat)
    for layer, order in enumerate(orders):
        survived = eviction_order(residency, layer)
        assert survived == order[len(order) - len(survived) :], "the order in which experts leave has changed"
        expected = dict(
            zip(
                survivors.expert[survivors.layer == layer].tolist(),
                survivors.new_slot[survivors.layer == layer].tolist(),
                strict=True,
            )
        )
        assert residency.residents(layer) == expected


@given(used_residencies(), st.tuples(*(st.integers(0, 5) for _ in N_EXPERTS)))
def test_growing_at_the_low_end_and_back_moves_and_loses_nothing(
    residency: Residency, growth: tuple[int, ...]
) -> None:
    small = residency.n_slots.tolist()
    before = [residency.residents(layer) for layer in range(len(N_EXPERTS))]
    order = residency.order.copy()
    large = [n + more for n, more in zip(small, growth, strict=True)]
    residency.repack(large, choose_survivors(residency, large, [-more for more in growth]))
    residency.check_valid()
    for layer, more in enumerate(growth):
        assert residency.residents(layer) == {e: slot + more for e, slot in before[layer].items()}
    residency.repack(small, choose_survivors(residency, small, growth))
    residency.check_valid()
    assert [residency.residents(layer) for layer in range(len(N_EXPERTS))] == before
    assert np.array_equal(residency.order, order)


@given(used_residencies())
def test_the_same_slots_again_change_nothing(residency: Residency) -> None:
    owner, order, counters = residency.owner.copy(), residency.order.copy(), residency.counters.copy()
    n_slots = residency.n_slots.tolist()
    residency.repack(n_slots, choose_survivors(residency, n_slots, [0] * len(n_slots)))
    for name, value in (("owner", owner), ("order", order), ("counters", counters)):
        assert np.array_equal(getattr(residency, name), value), name


@given(used_residencies(), new_sizes, st.tuples(*(st.integers(-9, 9) for _ in N_EXPERTS)))
def test_copies_in_order_overwrite_no_survivor(
    residency: Residency, n_slots: tuple[int, ...], shifts: tuple[int, ...]
) -> None:
    """Slots that move up from the last, then those that move down from the first: bytes arrive whole."""
    survivors = choose_survivors(residency, n_slots, shifts)
    for layer, shift in enumerate(shifts):
        mine = survivors.layer == layer
        old, new = survivors.old_slot[mine], survivors.new_slot[mine] + shift
        memory = {int(slot): int(expert) for slot, expert in zip(old, survivors.expert[mine], strict=True)}
        up = [k for k in range(len(old)) if new[k] > old[k]][::-1]
        down = [k for k in range(len(old)) if new[k] < old[k]]
        for k in up + down:
            memory[int(new[k])] = memory[int(old[k])]
        assert [memory[int(slot)] for slot in new] == survivors.expert[mine].tolist()


def test_pinned_slots_and_wrong_numbers_are_refused() -> None:
    residency = Residency([4, 4], [2, 2], PolicyKind.LRU)
    with pytest.raises(ValueError, match="repack 2 layers"):
        choose_survivors(residency, [2], [0])
    for n_slots in ([2], [2, 0], [2, 1 << 17]):
        with pytest.raises(ValueError, match="2 layers need"):
            residency.repack(n_slots, Survivors.none())
    one = np.zeros(1, np.int32)
    unlocked(residency).begin(0, one, one.copy(), one.copy())
    with pytest.raises(AssertionError, match="pinned"):
        choose_survivors(residency, [2, 2], [0, 0])
    with pytest.raises(AssertionError, match="pinned"):
        residency.resize([2, 2])


@given(used_residencies(), new_sizes, shift_lists)
def test_whole_layers_are_in_order(
    residency: Residency, n_slots: tuple[int, ...], shifts: tuple[int | None, ...]
) -> None:
    """With a slot for every expert, as many as can be keep their order and have the slots of their own numbers."""
    usual = choose_survivors(residency, n_slots, shifts)
    survivors = choose_survivors(residency, n_slots, shifts, in_order_where_all_fit=True)
    for layer, n_new in enumerate(n_slots):
        mine, before = survivors.layer == layer, usual.layer == layer
        if n_new != N_EXPERTS[layer]:
            assert survivors.new_slot[mine].tolist() == usual.new_slot[before].tolist()
            continue
        assert survivors.new_slot[mine].tolist() == survivors.expert[mine].tolist()
        assert (np.diff(survivors.old_slot[mine]) > 0).all()
        assert (np.diff(survivors.new_slot[mine]) > 0).all()
        experts = usual.expert[before].tolist()  # by old slot
        longest = [1] * len(experts)
        for i, expert in enumerate(experts):
            longest[i] = max([1, *(longest[j] + 1 for j in range(i) if experts[j] < expert)])
        assert mine.sum() == max(longest, default=0)
    residency.repack(n_slots, survivors)
    residency.check_valid()
