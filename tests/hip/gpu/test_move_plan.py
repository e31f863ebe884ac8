"""Plans: any order within a launch gives what the moves one after another give, in few launches."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from devices.device_contract import moved
from expertier.hip.gpu.moves import ordered_moves
from expertier.hip.gpu.moves import plan as move_plan
from expertier.hip.gpu.moves.ordered_moves import ordered_launches
from expertier.hip.gpu.moves.plan import PIECE_BYTES, MovePlan, Scratch, plan_in_order, plan_moves

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
@example([(1, 0, 40), (60, 20, 10)], 0)
@example([(0, 1, 200)], 0)
@example([(100, 0, 10), (0, 50, 10), (50, 100, 10)], 0)
@example([(10, 0, 10), (10, 30, 10)], 0)
@example([(10, 0, 10), (30, 10, 10)], 0)
def test_a_plan_does_what_the_moves_say(moves: list[tuple[int, int, int]], seed: int) -> None:
    array = np.array(moves, np.int64).reshape(-1, 3)
    check(moves, plan_moves(array, SCRATCH), seed)
    check(moves, plan_in_order(array, SCRATCH), seed)


@st.composite
def moves_in_order(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Pieces that keep their order, those that move up from the highest, those that move down from the lowest."""
    sizes = draw(st.lists(st.integers(1, 24), max_size=12))
    places = []
    for _ in range(2):
        free = ARENA - sum(sizes)
        cuts = sorted(draw(st.lists(st.integers(0, free), min_size=len(sizes), max_size=len(sizes))))
        places.append([gap + sum(sizes[:i]) for i, gap in enumerate(cuts)])
    pieces = list(zip(*places, sizes, strict=True))
    ups = [piece for piece in reversed(pieces) if piece[0] > piece[1]]
    downs = [piece for piece in pieces if piece[0] < piece[1]]
    directions = draw(st.permutations([True] * len(ups) + [False] * len(downs)))
    return [(ups if up else downs).pop(0) for up in directions]


@given(moves_in_order(), st.sampled_from([4, 1 << 20]), st.sampled_from([0, 2, 32]), st.integers(0, 99))
def test_moves_in_order_are_planned_in_one_sweep(
    moves: list[tuple[int, int, int]], piece_bytes: int, few: int, seed: int
) -> None:
    array = np.array(moves, np.int64).reshape(-1, 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(move_plan, "PIECE_BYTES", piece_bytes)
        patch.setattr(move_plan, "_ALIGNMENT", 4)
        patch.setattr(ordered_moves, "_FEW", few)
        patch.setattr(move_plan, "_by_level", lambda _: pytest.fail("moves in order were not seen to be so"))
        plan = plan_moves(array, SCRATCH)
    check(moves, plan, seed)
    if not plan.uses_scratch:
        assert (plan.rows[:, 2] <= piece_bytes).all()


@given(moves_of_any_kind)
def test_only_moves_in_order_are_taken_for_such(moves: list[tuple[int, int, int]]) -> None:
    whole = [(t, s, n) for t, s, n in moves if n and abs(t - s) >= n]
    found = ordered_launches(np.array(whole, np.int64).reshape(-1, 3)) if whole else None
    if found is not None:
        check(whole, MovePlan(*found, uses_scratch=False), 0)


def test_pieces_that_land_between_others_take_one_launch() -> None:
    """Every second slot is taken, and all move by one: nobody waits for anybody."""
    n, slot = 1000, 10
    sources = np.arange(n)[::-1] * 2 * slot
    up = np.stack([sources + slot, sources, np.full(n, slot)], axis=1)
    down = np.stack([sources[::-1], sources[::-1] + slot, np.full(n, slot)], axis=1)
    for moves in (up, down):
        assert len(plan_moves(moves, Scratch(1 << 30, 1 << 20)).ends) == 1


def test_a_long_piece_among_short_ones_is_cut() -> None:
    """It goes into the launch that it would have gone into; a launch has no blocks without work."""
    slot = 4096
    short = np.stack([slot * (2000 + np.arange(100)), slot * np.arange(100), np.full(100, slot)], axis=1)
    moves = np.concatenate([short, [[1 << 40, 1 << 30, 5 * PIECE_BYTES // 2]]])
    plan = plan_moves(moves, Scratch(1 << 50, 1 << 20))
    assert len(plan.ends) == 1
    assert len(plan.rows) == 103
    assert plan.rows[:, 2].max() <= PIECE_BYTES
    assert (plan.rows[100:, 0] % 16 == 0).all()


def test_two_directions_share_their_launches() -> None:
    n, slot = 512, 1 << 20
    survivors = np.random.default_rng(3).choice(n, n // 2, replace=False)
    up = boundary_move(n, survivors, slot, shift=n * slot)
    up[:, 1] += n * slot
    down = boundary_move(n, survivors, slot)
    down = np.stack([n * slot - slot - down[:, 0], n * slot - slot - down[:, 1], down[:, 2]], axis=1)
    scratch = Scratch(1 << 50, 16 << 20)
    alone = [len(plan_moves(moves, scratch).ends) for moves in (up, down)]
    together = plan_moves(np.concatenate([up, down]), scratch)
    assert len(together.ends) == max(alone)


def boundary_move(n: int, survivors: np.ndarray, slot: int, shift: int = 0) -> np.ndarray:
    """Survivors pack at the high end, the highest first."""
    sources = np.sort(survivors)[::-1] * slot
    targets = (n - 1 - np.arange(len(survivors))) * slot + shift
    return np.stack([targets, sources, np.full(len(survivors), slot)], axis=1)


def test_pieces_that_are_apart_take_one_launch() -> None:
    n = 5000
    moves = np.stack([np.arange(n) * 10, (n + np.arange(n)) * 10, np.full(n, 10)], axis=1)
    assert len(plan_moves(moves, Scratch(1 << 30, 1 << 20)).launches()) == 1


def test_half_of_an_arena_survives_in_few_launches() -> None:
    n, slot = 8192, 1 << 20
    survivors = np.random.default_rng(5).choice(n, n // 2, replace=False)
    moves = boundary_move(n, survivors, slot)
    plan = plan_moves(moves, Scratch(1 << 50, 16 << 20))
    assert not plan.uses_scratch
    assert len(plan.launches()) <= 24  # each about twice the one before
    assert len(plan.rows) == (moves[:, 0] != moves[:, 1]).sum()


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
