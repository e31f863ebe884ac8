"""The order in which pieces of a slab move, so that none is overwritten before it has moved."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]


def order_moves(old: I64, new: I64) -> I64:
    """Return the moves that bring pieces from `old` to `new`, in a safe order, as few as there can be.

    `old` and `new` have rows (offset, bytes, stride) of the same pieces; both are in increasing order of
    offset and neither overlaps itself. The result has rows (target, source, bytes); a target may overlap its
    own source. Neighbours that move by the same distance move as one, their gaps included.

    Because the pieces keep their order, no piece that moves up ever lands on one that moves down, nor the
    other way: upward moves from the highest down and then downward moves from the lowest up never
    overwrite a piece that is still to move.
    """
    shift = new[:, 0] - old[:, 0]
    adjoins = (shift[1:] == shift[:-1]) & (old[:-1, 0] + old[:-1, 2] == old[1:, 0])
    first = np.flatnonzero(np.concatenate(([True], ~adjoins))) if len(old) else np.empty(0, np.int64)
    last = np.concatenate((first[1:], [len(old)])) - 1 if len(old) else first
    runs = np.stack(
        [new[first, 0], old[first, 0], old[last, 0] + old[last, 1] - old[first, 0]], axis=1
    ).astype(np.int64)
    up = runs[runs[:, 0] > runs[:, 1]]
    down = runs[runs[:, 0] < runs[:, 1]]
    return np.ascontiguousarray(np.concatenate([up[::-1], down]))


def untouched(pieces: I64, moves: I64) -> npt.NDArray[np.bool_]:
    """Return for each of `pieces` (rows of offset, bytes, ...) whether no target of `moves` overlaps it."""
    if not len(moves):
        return np.ones(len(pieces), np.bool_)
    targets = moves[np.argsort(moves[:, 0])]
    begins, ends = targets[:, 0], np.maximum.accumulate(targets[:, 0] + targets[:, 2])
    before = np.searchsorted(
        begins, pieces[:, 0] + pieces[:, 1], side="left"
    )  # targets that begin below the end
    reach = np.where(before > 0, ends[np.maximum(before - 1, 0)], 0)
    intact: npt.NDArray[np.bool_] = reach <= pieces[:, 0]
    return intact
