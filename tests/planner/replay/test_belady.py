"""The offline optimum: brute force finds nothing better, no policy beats it, and L2 under it is a model's."""

from __future__ import annotations

from collections import OrderedDict
from itertools import combinations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from expertier.planner import PolicyKind
from expertier.planner.replay.run import BELADY, L1, compare, replay
from expertier.planner.traces.trace import Phase, Trace

calls_of = st.lists(
    st.tuples(
        st.integers(0, 1), st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True), st.booleans()
    ),
    min_size=1,
    max_size=40,
)

experts_of = st.integers(1, 62).map(lambda bits: [expert for expert in range(6) if bits >> expert & 1])


def make_trace(calls: list[tuple[int, list[int], bool]], n_layers: int = 2, n_experts: int = 6) -> Trace:
    """A trace of (layer, experts, decode) calls."""
    trace = Trace(
        layer=np.array([layer for layer, _, _ in calls], np.int32),
        step=np.arange(len(calls), dtype=np.int64),
        phase=np.array([Phase(decode) for _, _, decode in calls], np.uint8),
        rows=np.ones(len(calls), np.int32),
        bounds=np.cumsum([0, *(len(experts) for _, experts, _ in calls)]).astype(np.int64),
        experts=np.array([e for _, experts, _ in calls for e in experts], np.int32),
        sequences=np.array([0, len(calls)], np.int64),
        n_experts=np.full(n_layers, n_experts, np.int32),
        blocks=np.arange(n_layers, dtype=np.int32),
        expert_bytes=np.full(n_layers, 4096, np.int64),
    )
    trace.check_valid()
    return trace


def fewest_misses(calls: list[frozenset[int]], n_slots: int) -> int:
    """Try everything: after each call any set may stay that has the call's experts, or fits for one that does not."""
    states = {frozenset[int](): 0}
    for call in calls:
        reached: dict[frozenset[int], int] = {}
        for state, misses in states.items():
            cost = misses + len(call - state)
            if len(call) > n_slots:
                kept = [frozenset(c) for c in combinations(state | call, n_slots)]
            else:
                others = state - call
                kept = [
                    call | set(c)
                    for n in range(min(len(others), n_slots - len(call)) + 1)
                    for c in combinations(others, n)
                ]
            for new in kept:
                reached[new] = min(cost, reached.get(new, cost))
        states = reached
    return min(states.values())


@settings(max_examples=settings().max_examples // 2)
@given(
    st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True), min_size=1, max_size=14),
    st.integers(1, 5),
)
def test_brute_force_finds_nothing_better(calls: list[list[int]], n_slots: int) -> None:
    trace = make_trace([(0, experts, True) for experts in calls], n_layers=1)
    found = replay(trace, L1((n_slots,), n_slots * 4096), BELADY)
    assert found.misses == fewest_misses([frozenset(experts) for experts in calls], n_slots)


@settings(max_examples=settings().max_examples // 2)
@given(calls_of, st.tuples(st.integers(1, 6), st.integers(1, 6)))
def test_no_policy_misses_less(calls: list[tuple[int, list[int], bool]], slots: tuple[int, int]) -> None:
    trace = make_trace(calls)
    results = compare(trace, L1(slots, sum(slots) * 4096), [*PolicyKind, BELADY])
    optimum, closed = results[-1]
    for result, gap in results:
        assert result.misses >= optimum.misses, result.policy
        assert gap is None or gap <= 1
    assert closed in (None, 1)
    lru = next(pair for pair in results if pair[0].policy == PolicyKind.LRU)
    assert lru[1] in (None, 0)


def counts_with_l2(calls: list[tuple[int, list[int], bool]], n_slots: int, n_pool: int) -> tuple[int, int]:
    """The optimum written anew, with L2 under it: misses of L1, and hits of L2."""
    slots: list[list[int | None]] = [[None] * n_slots for _ in range(2)]
    pool: OrderedDict[tuple[int, int], None] = OrderedDict()
    misses = hits = 0
    for number, (layer, called, _) in enumerate(calls):
        here, experts = slots[layer], sorted(called)

        def wait(expert: int | None, layer: int = layer, number: int = number) -> int:
            later = calls[number + 1 :]
            return next((i for i, (at, used, _) in enumerate(later) if at == layer and expert in used), 999)

        missing = [expert for expert in experts if expert not in here]
        too_many = len(experts) > n_slots
        misses += len(missing)
        for expert in missing:
            free = [slot for slot in range(n_slots) if here[slot] is None]
            may_leave = [slot for slot in range(n_slots) if too_many or here[slot] not in experts]
            slot = free[0] if free else max(may_leave, key=lambda slot: wait(here[slot]))
            if free or not too_many or wait(expert) < wait(here[slot]):
                if (layer, here[slot]) in pool:
                    pool.move_to_end((layer, here[slot]))  # type: ignore[arg-type]
                here[slot] = expert
        there = [expert for expert in missing if (layer, expert) in pool]
        hits += len(there)
        for expert in [*there, *(expert for expert in missing if expert not in there)] if n_pool else ():
            pool[layer, expert] = None
            pool.move_to_end((layer, expert))
            if len(pool) > n_pool:
                pool.popitem(last=False)
        for expert in experts:
            if expert not in here and (layer, expert) in pool:
                pool.move_to_end((layer, expert))
    return misses, hits


# The read of 0 may not push 4 out of L2, which has it; the same of 2, in a call that comes in parts.
@example([(0, [3, 4], True), (0, [1, 3], True), (0, [0, 4], True)], 2, 3)
@example([(1, [2], True), (1, [0], True), (1, [1, 2], True)], 1, 2)
@given(
    st.lists(st.tuples(st.integers(0, 1), experts_of, st.just(True)), min_size=4, max_size=25),
    st.integers(1, 5),
    st.integers(0, 9),
)
def test_l2_under_the_optimum(calls: list[tuple[int, list[int], bool]], n_slots: int, n_pool: int) -> None:
    found = replay(make_trace(calls), L1((n_slots,) * 2, 0), BELADY, pool_bytes=n_pool * 4096)
    assert (found.misses, found.pool_hits) == counts_with_l2(calls, n_slots, n_pool)


def test_a_call_s_own_experts_are_never_victims() -> None:
    # 1 is used again first, so an optimum that may drop 0 and 2 while they are needed would miss once less.
    trace = make_trace([(0, [1], True), (0, [0, 2], True), (0, [1], True)], n_layers=1)
    assert replay(trace, L1((2,), 2 * 4096), BELADY).misses == 4


def test_the_optimum_knows_no_further_than_a_sequence() -> None:
    calls = [(0, [e], True) for e in (0, 1, 2, 0)]
    trace = make_trace(calls, n_layers=1)
    assert replay(trace, L1((2,), 2 * 4096), BELADY).misses == 3
    halves = make_trace(calls, n_layers=1)
    object.__setattr__(halves, "sequences", np.array([0, 3, 4]))
    assert replay(halves, L1((2,), 2 * 4096), BELADY).misses == 3
    assert replay(halves, L1((2,), 2 * 4096), BELADY, each_from_cold=True).misses == 4


@pytest.mark.parametrize("n_slots", [1, 3])
def test_a_call_with_more_experts_than_slots_hits_what_was_there(n_slots: int) -> None:
    trace = make_trace([(0, [0], True), (0, [0, 1, 2, 3], True), (0, [2], True)], n_layers=1)
    found = replay(trace, L1((n_slots,), n_slots * 4096), BELADY)
    assert found.misses == 1 + 3
