"""Compiled functions for moves of the boundary: the order of moves, and all of `ArenaLayout.work_to`.

They are compiled because the engine waits for a move.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import int64, types

from expertier.compiled_functions import cached_njit
from expertier.tiers.model.slot_layout import GUARD_BYTES

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]

_SLOTS = types.Array(types.int32, 1, "C")
_ROWS = types.Array(int64, 2, "C")


@cached_njit(int64(_ROWS, _ROWS, int64, _ROWS))
def write_runs(old: I64, new: I64, n: int, runs: I64) -> int:
    """Write the moves of `n` pieces from `old` to `new` into `runs`, and return their number.

    First come the upward moves, from the highest to the lowest, then the downward moves, from the lowest to the
    highest. `runs` has a row for each piece, and one more.
    """
    n_up = 0
    # A run is a row of adjacent pieces that move by the same distance. This loop goes backwards, and writes an upward
    # run when it reaches the run's first piece.
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


@cached_njit(int64(_SLOTS, _SLOTS, _ROWS, _ROWS, int64, _ROWS))
def write_guards(layers: I32, slots: I32, arrays: I64, tails: I64, base: int, zeros: I64) -> int:
    """Write `tails`, and the heads of all pieces except those of `slots`, into `zeros`; return how many rows there are.

    `base` is added to every offset. `arrays` is `ArenaLayout.arrays`. The slots are sorted by layer, then by slot.
    """
    n = len(tails)
    for i in range(n):
        zeros[i, 0] = base + tails[i, 0]
        zeros[i, 1] = tails[i, 1]
    begin = end = 0  # the layer's slots are `slots[begin:end]`
    for array in range(len(arrays)):
        layer, offset, n_bytes, stride, n_slots = arrays[array]
        if array == 0 or arrays[array - 1, 0] != layer:
            begin = end
            while end < len(layers) and layers[end] == layer:
                end += 1
        at = begin
        for slot in range(n_slots):
            if at < end and slots[at] == slot:
                at += 1
            else:
                zeros[n, 0] = base + offset + slot * stride
                zeros[n, 1] = min(n_bytes, GUARD_BYTES)
                n += 1
    return n


@cached_njit(int64(_SLOTS, _SLOTS, _ROWS, _ROWS))
def write_pieces(layers: I32, slots: I32, arrays: I64, rows: I64) -> int:
    """Write (offset, bytes, stride) of all pieces of `slots` into `rows`, by address; return how many there are."""
    n = 0
    begin = end = 0
    for array in range(len(arrays)):
        layer, offset, n_bytes, stride, _ = arrays[array]
        if array == 0 or arrays[array - 1, 0] != layer:
            begin = end
            while end < len(layers) and layers[end] == layer:
                end += 1
        for at in range(begin, end):
            rows[n, 0] = offset + slots[at] * stride
            rows[n, 1] = n_bytes
            rows[n, 2] = stride
            n += 1
    return n


@cached_njit(int64(_SLOTS, _SLOTS, _SLOTS, _ROWS, _ROWS, _ROWS, int64, _ROWS, _ROWS))
def write_work(
    layers: I32,
    old_slots: I32,
    new_slots: I32,
    old_arrays: I64,
    new_arrays: I64,
    tails: I64,
    base: int,
    moves: I64,
    zeros: I64,
) -> int:
    """Write the moves of slots from one layout to another into `moves`, and what has to be zeroed then into `zeros`.

    `base` is added to every offset; `tails` are those of the new layout. Returns both numbers of rows in one integer:
    (rows of moves) * (len(zeros) + 1) + (rows of zeros).
    """
    old = np.empty((len(moves), 3), np.int64)
    new = np.empty((len(moves), 3), np.int64)
    # Slots keep their order, and so do their pieces: the n-th piece of one layout is the n-th piece of the other.
    n = write_pieces(layers, old_slots, old_arrays, old)
    write_pieces(layers, new_slots, new_arrays, new)
    n_moves = write_runs(old, new, n, moves)
    for i in range(n_moves):
        moves[i, 0] += base
        moves[i, 1] += base
    return n_moves * (len(zeros) + 1) + write_guards(layers, new_slots, new_arrays, tails, base, zeros)
