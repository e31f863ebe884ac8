"""Moves within a slab: whatever moves wherever, in a safe order, and what a failure leaves intact."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from expertier.tiers.slots.moves import order_moves, untouched

I64 = npt.NDArray[np.int64]
SIZE = 400


@st.composite
def pieces(draw: st.DrawFn) -> tuple[I64, I64]:
    """Pieces at two places each, in the same order and apart in both."""
    n = draw(st.integers(0, 8))
    sizes = draw(st.lists(st.integers(1, 20), min_size=n, max_size=n))
    gaps = draw(st.lists(st.integers(0, 4), min_size=n, max_size=n))
    sides = []
    for _ in range(2):
        at, rows = 0, []
        for size, gap in zip(sizes, gaps, strict=True):
            at += draw(st.sampled_from([0, 0, 1, 3, 7, 25]))
            rows.append((at, size, size + gap))
            at += size + gap
        sides.append(np.array(rows, np.int64).reshape(-1, 3))
    return sides[0], sides[1]


def move(memory: I64, moves: I64) -> None:
    for target, source, n in moves.tolist():
        memory[target : target + n] = memory[source : source + n].copy()


@given(pieces())
def test_every_piece_arrives(both: tuple[I64, I64]) -> None:
    old, new = both
    before = np.arange(1, SIZE + 1)
    memory = before.copy()
    move(memory, order_moves(old, new))
    for (source, n, _), (target, _, _) in zip(old.tolist(), new.tolist(), strict=True):
        assert (memory[target : target + n] == before[source : source + n]).all()


@given(pieces())
def test_what_stays_is_not_moved_and_neighbours_move_together(both: tuple[I64, I64]) -> None:
    old, _ = both
    assert order_moves(old, old).shape == (0, 3)
    shifted = old + np.array([[5, 0, 0]])
    joins = (old[:-1, 0] + old[:-1, 2] == old[1:, 0]).sum() if len(old) else 0
    assert len(order_moves(old, shifted)) == len(old) - joins


@given(pieces(), st.integers(0, 8))
def test_what_counts_as_intact_is_intact_wherever_the_moves_stop(both: tuple[I64, I64], done: int) -> None:
    old, new = both
    moves = order_moves(old, new)
    before = np.arange(1, SIZE + 1)
    memory = before.copy()
    move(memory, moves[:done])
    for (source, n, _), intact in zip(old.tolist(), untouched(old, moves).tolist(), strict=True):
        assert not intact or (memory[source : source + n] == before[source : source + n]).all()


@given(pieces())
def test_intact_is_what_no_target_touches(both: tuple[I64, I64]) -> None:
    old, new = both
    moves = order_moves(old, new)
    hit = np.zeros(SIZE, np.bool_)
    for target, _, n in moves.tolist():
        hit[target : target + n] = True
    expected = [not hit[source : source + n].any() for source, n, _ in old.tolist()]
    assert untouched(old, moves).tolist() == expected
