"""The order in which pieces of a slab move, so that none is overwritten before it has moved."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]


def order_moves(old: I64, new: I64) -> I64:
    """Return the moves that bring pieces from `old` to `new`, as few as possible and in an order that is safe.

    `old` and `new` have rows (offset, bytes, stride) of the same pieces, in increasing order of offset, and in each of
    the two no pieces overlap. The result has rows (target, source, bytes); a target may overlap its own source.
    Adjacent pieces that move by the same distance become one move, together with the gaps between them.

    The order is safe because the pieces keep their order: a piece that moves up never lands on a piece that moves down,
    nor the reverse. First come the upward moves, from the highest piece to the lowest, and then the downward moves,
    from the lowest to the highest. So no move overwrites a piece that has yet to move.
    """
    from expertier.tiers.slots.move_runs import write_runs  # imports Numba

    runs = np.empty((len(old) + 1, 3), np.int64)
    return runs[: write_runs(old, new, len(old), runs)]


def compile_moves() -> None:
    """Compile the functions that a move needs, or load them from the on-disk cache, so that no move waits for that."""
    import expertier.tiers.slots.move_runs  # noqa: F401


def untouched(pieces: I64, moves: I64) -> npt.NDArray[np.bool_]:
    """Return for each of `pieces`, rows of (offset, bytes, ...), whether all targets of `moves` leave it alone."""
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
