"""Who stays when the slots are laid out anew, as compiled code: `repack.py` tells what is chosen.

A move of the boundary waits for this, so it looks at every slot once and makes no object for any of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np
from numba import int64, njit, types

from expertier.planner.outcome import Outcome
from expertier.planner.tables import I32, I64, LayerView, accepts, compiled, layer_view, source_stamp

LAYER, EXPERT, OLD_SLOT, NEW_SLOT = range(4)
"""The rows of `kept`."""

NOT_IN_LINE = -(1 << 62)
"""The shift of a layer whose slots do not lie on each other."""

_BAD_CALL = int(Outcome.BAD_CALL)

_F = TypeVar("_F", bound=Callable[..., int])

Choose: TypeAlias = Callable[[int, I32, I64, int, I32], int]


@compiled
def _choose_in_layer(view: LayerView, n_new: int, kept: I32, begin: int) -> int:
    """Write who stays of a layer, by slot, from column `begin` on; return where that ends."""
    n_residents = 0
    for slot in range(len(view.owner)):
        n_residents += view.owner[slot] >= 0
    coldest = np.int64(0)
    if n_residents > n_new:
        # FREE slots are below all others in `order`.
        coldest = np.sort(view.order)[len(view.order) - n_new]
    end = begin
    for slot in range(len(view.owner)):
        if view.owner[slot] >= 0 and view.order[slot] >= coldest:
            kept[EXPERT, end] = view.owner[slot]
            kept[OLD_SLOT, end] = slot
            end += 1
    return end


@compiled
def _place(kept: I32, begin: int, end: int, n_new: int, shift: int) -> None:
    """Choose rising new slots below `n_new`, in place where that is possible."""
    if shift == NOT_IN_LINE:
        for at in range(begin, end):
            kept[NEW_SLOT, at] = at - begin
        return
    # From the last one down, each lies where it is, or right below the one above it where that lies too low.
    lowest = n_new - (end - begin)
    for at in range(end - 1, begin - 1, -1):
        rank = at - begin
        lowest = min(lowest, max(kept[OLD_SLOT, at] - shift - rank, 0))
        kept[NEW_SLOT, at] = rank + lowest


@compiled
def _keep_rising(kept: I32, begin: int, end: int) -> int:
    """Keep a longest part whose experts rise, each in the slot of its own number; return where that ends."""
    n = end - begin
    last = np.empty(n, np.int64)  # of each length, the index of the lowest expert that ends such a part
    before = np.empty(n, np.int64)
    longest = 0
    for i in range(n):
        expert = kept[EXPERT, begin + i]
        low, high = 0, longest
        while low < high:
            middle = (low + high) // 2
            if kept[EXPERT, begin + last[middle]] < expert:
                low = middle + 1
            else:
                high = middle
        before[i] = last[low - 1] if low > 0 else -1
        last[low] = i
        longest = max(longest, low + 1)
    i = last[longest - 1] if longest > 0 else -1
    chosen = np.zeros(n, np.bool_)
    while i >= 0:
        chosen[i] = True
        i = before[i]
    at = begin
    for i in range(n):
        if chosen[i]:
            kept[EXPERT, at] = kept[EXPERT, begin + i]
            kept[OLD_SLOT, at] = kept[OLD_SLOT, begin + i]
            kept[NEW_SLOT, at] = kept[EXPERT, begin + i]
            at += 1
    return at


@cache
def choose_survivors() -> Choose:
    """Return `choose(directory, n_slots, shifts, whole_in_order, kept)`, compiled or from the on-disk cache.

    It writes a column of `kept`, int32[4, all slots], for each expert that stays in layers of `n_slots` slots,
    int32[L], and returns how many there are. `shifts`, int64[L], are as `survivors` has them, or NOT_IN_LINE.
    """
    return _build(source_stamp())


def _compiled(*arguments: Any) -> Callable[[_F], _F]:
    return cast(Callable[[_F], _F], njit(int64(*arguments), cache=True))


def _build(stamp: int) -> Choose:
    """Compile. `stamp` is a cell of the function, and so part of its key in Numba's cache."""

    @_compiled(
        int64,
        types.Array(types.int32, 1, "C"),
        types.Array(types.int64, 1, "C"),
        int64,
        types.Array(types.int32, 2, "C"),
    )
    def choose(directory: int, n_slots: I32, shifts: I64, whole_in_order: int, kept: I32) -> int:
        end = 0
        for layer in range(len(n_slots)):
            if not accepts(directory, layer, stamp):
                return _BAD_CALL
            view = layer_view(directory, layer)
            begin = end
            end = _choose_in_layer(view, n_slots[layer], kept, begin)
            if whole_in_order and n_slots[layer] == len(view.slot_of):
                end = _keep_rising(kept, begin, end)
            else:
                _place(kept, begin, end, n_slots[layer], shifts[layer])
            kept[LAYER, begin:end] = layer
        return end

    return choose
