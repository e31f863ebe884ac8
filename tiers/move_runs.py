"""What a move of the boundary waits for, compiled: the order of its moves, and all of `ArenaLayout.work_to`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import int64, njit, types

Bools = npt.NDArray[np.bool_]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]

_BOOLS = types.Array(types.boolean, 1, "C")
_SLOTS = types.Array(types.int32, 1, "C")
_NUMBERS = types.Array(int64, 1, "C")
_ROWS = types.Array(int64, 2, "C")


@njit(int64(_ROWS, _ROWS, int64, _ROWS), cache=True)
def write_runs(old: I64, new: I64, n: int, runs: I64) -> int:
    """Write the moves of `n` pieces from `old` to `new` into `runs`, from the highest that goes up down and then from
    the lowest that goes down up; return how many they are. `runs` has a row for each piece, and one more."""
    n_up = 0
    # Backwards, a run that goes up is written when its first piece is reached.
    last = n - 1
    for i in range(n - 1, -1, -1):
        by = new[i, 0] - old[i, 0]
        if i > 0 and by == new[i - 1, 0] - old[i - 1, 0] and old[i - 1, 0] + old[i - 1, 2] == old[i, 0]:
            continue
        if by > 0:
            runs[n_up, 0] = new[i, 0]
            runs[n_up, 1] = old[i, 0]
            runs[n_up, 2] = old[last, 0] + old[last, 1] - old[i, 0]
            n_up += 1
        last = i - 1
    end = n_up
    first = 0
    for i in range(n):
        by = new[i, 0] - old[i, 0]
        if i + 1 < n and by == new[i + 1, 0] - old[i + 1, 0] and old[i, 0] + old[i, 2] == old[i + 1, 0]:
            continue
        if by < 0:
            runs[end, 0] = new[first, 0]
            runs[end, 1] = old[first, 0]
            runs[end, 2] = old[i, 0] + old[i, 1] - old[first, 0]
            end += 1
        first = i + 1
    return end


@njit(int64(_BOOLS, _NUMBERS, _ROWS, _ROWS, int64, _ROWS), cache=True)
def write_guards(taken: Bools, slot_of: I64, heads: I64, tails: I64, base: int, zeros: I64) -> int:
    """Write `tails`, and the `heads` of pieces whose slots are not `taken`, into `zeros`; return how many they are.

    Addresses count from `base`. `slot_of` has each piece's slot."""
    for i in range(len(tails)):
        zeros[i, 0] = base + tails[i, 0]
        zeros[i, 1] = tails[i, 1]
    n = len(tails)
    for i in range(len(slot_of)):
        if not taken[slot_of[i]]:
            zeros[n, 0] = base + heads[i, 0]
            zeros[n, 1] = heads[i, 1]
            n += 1
    return n


@njit(int64(_BOOLS, _NUMBERS, _ROWS, _ROWS), cache=True)
def _gather(taken: Bools, slot_of: I64, rows: I64, chosen: I64) -> int:
    """Write the rows of pieces whose slots are `taken` into `chosen`; return how many they are."""
    n = 0
    for i in range(len(slot_of)):
        if taken[slot_of[i]]:
            chosen[n, 0] = rows[i, 0]
            chosen[n, 1] = rows[i, 1]
            chosen[n, 2] = rows[i, 2]
            n += 1
    return n


@njit(
    int64(
        _SLOTS,
        _SLOTS,
        _SLOTS,
        _NUMBERS,
        _NUMBERS,
        _ROWS,
        _NUMBERS,
        _NUMBERS,
        _ROWS,
        _ROWS,
        _ROWS,
        int64,
        _ROWS,
        _ROWS,
    ),
    cache=True,
)
def write_work(
    layers: I32,
    old_slots: I32,
    new_slots: I32,
    old_first: I64,
    old_slot_of: I64,
    old_rows: I64,
    new_first: I64,
    new_slot_of: I64,
    new_rows: I64,
    heads: I64,
    tails: I64,
    base: int,
    moves: I64,
    zeros: I64,
) -> int:
    """Write the moves of slots from one layout to another into `moves`, and what is zero then into `zeros`.

    Addresses count from `base`. Of each layout: the layers' first slots, and of each piece its slot and its row; of the
    new one besides what `write_guards` takes. Returns how many moves, times one more than `zeros` has rows, plus how
    many zeros.
    """
    old_taken = np.zeros(len(old_slot_of), np.bool_)  # there are no more slots than pieces
    new_taken = np.zeros(len(new_slot_of), np.bool_)
    for i in range(len(layers)):
        old_taken[old_first[layers[i]] + old_slots[i]] = True
        new_taken[new_first[layers[i]] + new_slots[i]] = True
    old = np.empty((len(old_slot_of), 3), np.int64)
    new = np.empty((len(new_slot_of), 3), np.int64)
    # Slots keep their order, and so do their pieces: the n-th of the one layout is the n-th of the other.
    n = _gather(old_taken, old_slot_of, old_rows, old)
    _gather(new_taken, new_slot_of, new_rows, new)
    n_moves = write_runs(old, new, n, moves)
    for i in range(n_moves):
        moves[i, 0] += base
        moves[i, 1] += base
    return n_moves * (len(zeros) + 1) + write_guards(new_taken, new_slot_of, heads, tails, base, zeros)
