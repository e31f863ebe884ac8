"""The loop of `moves.order_moves`, compiled: a move of the boundary waits for it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import int64, njit, types

I64 = npt.NDArray[np.int64]

_ROWS = types.Array(int64, 2, "C")


@njit(int64(_ROWS, _ROWS, _ROWS), cache=True)
def write_runs(old: I64, new: I64, runs: I64) -> int:
    """Write the moves from `old` to `new` into `runs`, from the highest that goes up down and then from the lowest
    that goes down up; return how many they are. `runs` has a row for each piece, and one more."""
    n = len(old)
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
