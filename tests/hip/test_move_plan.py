"""Plans: any order within a launch gives what the moves one after another give, in few launches."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from device_contract import moved
from expertier.hip.move_plan import MovePlan, Scratch, plan_in_order, plan_moves

ARENA = 256
SCRATCH = Scratch(ARENA, 64)

moves_of_any_kind = st.lists(
    st.tuples(st.integers(0, ARENA - 1), st.integers(0, ARENA - 1), st.integers(0, 40)).filter(
        lambda move: max(move[0], move[1]) + move[2] <= ARENA
    ),
    max_size=14,
)


def check(moves: list[tuple[int, int, int]], plan: MovePlan, seed: int) -> None:
    content = np.random.default_rng(seed).integers(0, 256, ARENA + SCRATCH.n_bytes, np.uint8).tobytes()
    memory = content
    launches = plan.launches()
    assert sum(map(len, launches)) == len(plan.rows)
    for launch in launches:
        assert len(launch)
        check_independent(launch)
        shuffled = np.random.default_rng(seed).permutation(launch)
        memory = moved(memory, [tuple(row) for row in shuffled.tolist()])
    assert memory[:ARENA] == moved(content, moves)[:ARENA]
    touches_scratch = bool(len(plan.rows)) and bool((plan.rows[:, :2] >= ARENA).any())
    assert plan.uses_scratch == touches_scratch


def check_independent(launch: np.ndarray) -> None:
    for i, (target, source, n_bytes) in enumerate(launch.tolist()):
        assert n_bytes > 0
        assert target + n_bytes <= source or source + n_bytes <= target, "a piece overlaps itself"
        for j, (other_target, other_source, other_bytes) in enumerate(launch.tolist()):
            if i != j:
                for begin in (other_target, other_source):
                    assert begin >= target + n_bytes or begin + other_bytes <= target, "pieces depend"


@given(moves_of_any_kind, st.integers(0, 99))
@example([(1, 0, 200)], 0)
@example([(0, 1, 200)], 0)
@example([(100, 0, 10), (0, 50, 10), (50, 100, 10)], 0)
@example([(10, 0, 10), (10, 30, 10)], 0)
@example([(10, 0, 10), (30, 10, 10)], 0)
def test_a_plan_does_what_the_moves_say(moves: list[tuple[int, int, int]], seed: int) -> None:
    array = np.array(moves, np.int64).reshape(-1, 3)
    check(moves, plan_moves(array, SCRATCH), seed)
    check(moves, plan_in_order(array, SCRATCH), seed)


def boundary_move(n: int, kept: np.ndarray, slot: int, shift: int = 0) -> np.ndarray:
    """Survivors pack at the high end, the highest first."""
    sources = np.sort(kept)[::-1] * slot
    targets = (n - 1 - np.arange(len(kept))) * slot + shift
    return np.stack([targets, sources, np.full(len(kept), slot)], axis=1)


def test_pieces_that_are_apart_take_one_launch() -> None:
    n = 5000
    moves = np.stack([np.arange(n) * 10, (n + np.arange(n)) * 10, np.full(n, 10)], axis=1)
    assert len(plan_moves(moves, Scratch(1 << 30, 1 << 20)).launches()) == 1


def test_half_of_an_arena_survives_in_few_launches() -> None:
    n, slot = 8192, 1 << 20
    kept = np.random.default_rng(5).choice(n, n // 2, replace=False)
    plan = plan_moves(boundary_move(n, kept, slot), Scratch(1 << 50, 16 << 20))
    assert not plan.uses_scratch
    assert len(plan.launches()) <= 24  # each about twice the one before
    moved_rows = (boundary_move(n, kept, slot)[:, 0] != boundary_move(n, kept, slot)[:, 1]).sum()
    assert len(plan.rows) == moved_rows


def test_a_shift_by_little_goes_through_scratch() -> None:
    n, slot, scratch_bytes = 512, 1 << 20, 16 << 20
    plan = plan_moves(boundary_move(n, np.arange(n), slot, shift=512), Scratch(1 << 50, scratch_bytes))
    assert plan.uses_scratch
    assert len(plan.launches()) <= 2 * (n * slot // scratch_bytes + n * slot // scratch_bytes // 10 + 1)


def test_scratch_keeps_the_alignment_of_vectors() -> None:
    plan = plan_moves(np.array([[4096 + 8 + 3, 3, 9000]]), Scratch(1 << 30, 1 << 20))
    shifted = plan_moves(np.array([[1, 0, 9000]]), Scratch(1 << 30, 1 << 20))
    assert not plan.uses_scratch
    assert shifted.uses_scratch
    into = shifted.launches()[0]
    assert ((into[:, 0] - into[:, 1]) % 16 == 0).all()


@pytest.mark.parametrize("moves", [[[0, 1, -1]], [[0, 1]], [0, 1, 2]])
def test_moves_that_are_none(moves: list[object]) -> None:
    with pytest.raises(ValueError, match="move"):
        plan_moves(np.array(moves), SCRATCH)


def test_nothing_to_do() -> None:
    plan = plan_moves(np.array([[5, 5, 100], [0, 9, 0]]), SCRATCH)
    assert plan.launches() == []
