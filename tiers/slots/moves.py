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
    from expertier.tiers.slots.move_runs import write_runs  # imports Numba

    runs = np.empty((len(old) + 1, 3), np.int64)
    return runs[: write_runs(old, new, len(old), runs)]


def compile_moves() -> None:
    """Compile what a move needs, or load it from the on-disk cache: else the first move does."""
    import expertier.tiers.slots.move_runs  # noqa: F401


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
