"""Compiled code that chooses the experts that stay when the slots are laid out anew, and fills the new tables.

`repack.py` says which experts are chosen, and `Residency.repack` what the tables contain afterwards. A move of the
boundary waits for both steps, so the code looks at every slot once and makes no Python object for a slot.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numba import int64, types

from expertier.compiled_functions import cached_njit
from expertier.planner.policy.outcome import Outcome
from expertier.planner.policy.repack import NOT_IN_LINE
from expertier.planner.policy.tables import (
    EVICTED_BY,
    EVICTIONS,
    HEAD,
    I32,
    I64,
    N_SLOTS,
    ORDER,
    OWNER,
    PINNED_BIT,
    PINS,
    RANK_FREE,
    ROW,
    SLOT_BITS,
    SLOT_OF,
    SPECULATIVE,
    STATE,
    U8,
    WASTED,
    LayerView,
    accepts,
    compiled,
    layer_view,
    source_stamp,
)

LAYER, EXPERT, OLD_SLOT, NEW_SLOT = range(4)
"""The rows of `survivors`, which is int32[4, all slots]."""

_BAD_CALL = int(Outcome.BAD_CALL)

_F = TypeVar("_F", bound=Callable[..., int])

Choose: TypeAlias = Callable[[int, I32, I64, int, I32], int]


class NewTables(NamedTuple):
    """Memory for the tables of other numbers of slots, as `Residency` has them; only the first two are written."""

    first: I32
    n_slots: I32
    slot_of: I32
    owner: I32
    state: U8
    pins: I32
    order: I64
    evicted_by: I32


MoveTables: TypeAlias = Callable[[int, I64, I32, I32, I32, I32, NewTables], int]


@compiled
def _choose_in_layer(view: LayerView, n_new: int, survivors: I32, begin: int) -> int:
    """Write a layer's survivors by slot from column `begin` on; return the end column, or -1 if a slot is pinned."""
    n_residents = 0
    n_pinned = 0
    for slot in range(len(view.owner)):
        n_residents += view.owner[slot] >= 0
        n_pinned += view.pins[slot] != 0
    if n_pinned:
        return -1
    threshold = np.int64(0)
    if n_residents > n_new:
        # Find the largest threshold that `n_new` orders reach, bit by bit, as NumPy's sort takes long to compile. The
        # orders of FREE slots are below 0, so they never reach it.
        for bit in range(PINNED_BIT - 1, -1, -1):
            above = threshold | (np.int64(1) << bit)
            n_above = 0
            for slot in range(len(view.order)):
                n_above += view.order[slot] >= above
            if n_above >= n_new:
                threshold = above
    end = begin
    for slot in range(len(view.owner)):
        if view.owner[slot] >= 0 and view.order[slot] >= threshold:
            survivors[EXPERT, end] = view.owner[slot]
            survivors[OLD_SLOT, end] = slot
            end += 1
    return end


@compiled
def _place(survivors: I32, begin: int, end: int, n_new: int, shift: int) -> None:
    """Choose rising new slots below `n_new`, and leave an expert in its place in memory where that is possible."""
    if shift == NOT_IN_LINE:
        for at in range(begin, end):
            survivors[NEW_SLOT, at] = at - begin
        return
    # From the last survivor down: each keeps its place, or goes right below its upper neighbor if that lies too low.
    lowest = n_new - (end - begin)
    for at in range(end - 1, begin - 1, -1):
        rank = at - begin
        lowest = min(lowest, max(survivors[OLD_SLOT, at] - shift - rank, 0))
        survivors[NEW_SLOT, at] = rank + lowest


@compiled
def _keep_rising(survivors: I32, begin: int, end: int) -> int:
    """Keep a longest rising subsequence of experts, each in the slot of its number; return its end column."""
    n = end - begin
    last = np.empty(
        n, np.int64
    )  # for each length, the index of the lowest expert that ends such a subsequence
    before = np.empty(n, np.int64)
    longest = 0
    for i in range(n):
        expert = survivors[EXPERT, begin + i]
        low, high = 0, longest
        while low < high:
            middle = (low + high) // 2
            if survivors[EXPERT, begin + last[middle]] < expert:
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
            survivors[EXPERT, at] = survivors[EXPERT, begin + i]
            survivors[OLD_SLOT, at] = survivors[OLD_SLOT, begin + i]
            survivors[NEW_SLOT, at] = survivors[EXPERT, begin + i]
            at += 1
    return at


@compiled
def _stay_where_they_should(
    directory: int, layers: I32, experts: I32, old_slots: I32, new_slots: I32, n_slots: I32
) -> bool:
    seen = 0
    view = layer_view(directory, seen)
    for i in range(len(layers)):
        if layers[i] != seen:
            seen = int(layers[i])
            view = layer_view(directory, seen)
        if view.owner[old_slots[i]] != experts[i] or new_slots[i] >= n_slots[layers[i]]:
            return False
    return True


@compiled
def _free_all(slot_of: I32, new: NewTables, first: int, n_slots: int) -> None:
    for expert in range(len(slot_of)):
        slot_of[expert] = -1
    for slot in range(n_slots):
        new.owner[first + slot] = -1
        new.state[first + slot] = 0
        new.pins[first + slot] = 0
        new.order[first + slot] = (RANK_FREE << SLOT_BITS) | slot
        new.evicted_by[first + slot] = -1


@compiled
def _leave_all(view: LayerView) -> None:
    """Count a layer's residents as evicted, and those that were prefetched and not used as wasted."""
    for slot in range(len(view.owner)):
        if view.owner[slot] >= 0:
            view.counters[EVICTIONS] += 1
            view.counters[WASTED] += (view.state[slot] & SPECULATIVE) != 0


@compiled
def _stay(
    view: LayerView, slot_of: I32, new: NewTables, expert: int, old_slot: int, new_slot: int, to: int
) -> None:
    """Enter an expert that stays at index `to` of the new tables, and undo what `_leave_all` counted for it."""
    state = view.state[old_slot]
    view.counters[EVICTIONS] -= 1
    view.counters[WASTED] -= (state & SPECULATIVE) != 0
    new.owner[to] = expert
    new.state[to] = state
    new.order[to] = (view.order[old_slot] >> SLOT_BITS << SLOT_BITS) | new_slot
    slot_of[expert] = new_slot


@dataclass(frozen=True, slots=True)
class RepackCalls:
    """The two functions, compiled or from the on-disk cache.

    `choose(directory, n_slots, shifts, in_order_where_all_fit, survivors)` writes a column of `survivors`,
    int32[4, all slots], for each expert that stays in layers of `n_slots` slots, int32[L]. It returns the number of
    survivors, or a number below 0 if a slot is pinned. `shifts`, int64[L], are as in `repack.choose_survivors`, with
    NOT_IN_LINE for None.

    `move(directory, to, layers, experts, old_slots, new_slots, tables)` fills new tables with the experts that stay,
    given as int32 arrays of equal length. It counts all remaining experts as evicted and writes the addresses of the
    new tables into `to`, a copy of the directory. It returns 0. If an expert is not in its old slot, or its new slot
    does not exist, it returns another number and has changed nothing.
    """

    choose: Choose
    move: MoveTables


@cache
def repack_calls() -> RepackCalls:
    """Return the functions; the first time compiles them or loads them from the on-disk cache."""
    return _build(source_stamp())


def _compiled(*arguments: Any) -> Callable[[_F], _F]:
    return cached_njit(int64(*arguments))


def _array(kind: Any, n_dimensions: int = 1) -> Any:
    return types.Array(kind, n_dimensions, "C")


def _build(stamp: int) -> RepackCalls:
    """Compile both functions. Each is a closure over `stamp`, so `stamp` is part of its key in Numba's cache."""
    numbers = _array(types.int32)

    @_compiled(int64, numbers, _array(int64), int64, _array(types.int32, 2))
    def choose(directory: int, n_slots: I32, shifts: I64, in_order_where_all_fit: int, survivors: I32) -> int:
        end = 0
        for layer in range(len(n_slots)):
            if not accepts(directory, layer, stamp):
                return _BAD_CALL
            view = layer_view(directory, layer)
            begin = end
            end = _choose_in_layer(view, n_slots[layer], survivors, begin)
            if end < begin:
                return _BAD_CALL
            if in_order_where_all_fit and n_slots[layer] == len(view.slot_of):
                end = _keep_rising(survivors, begin, end)
            else:
                _place(survivors, begin, end, n_slots[layer], shifts[layer])
            survivors[LAYER, begin:end] = layer
        return end

    @_compiled(
        int64,
        _array(int64),
        numbers,
        numbers,
        numbers,
        numbers,
        types.NamedTuple(  # type: ignore[no-untyped-call]
            [
                numbers,
                numbers,
                _array(types.int32, 2),
                numbers,
                _array(types.uint8),
                numbers,
                _array(int64),
                numbers,
            ],
            NewTables,
        ),
    )
    def move(
        directory: int,
        to: I64,
        layers: I32,
        experts: I32,
        old_slots: I32,
        new_slots: I32,
        new: NewTables,
    ) -> int:
        if not accepts(directory, len(new.n_slots) - 1, stamp):
            return _BAD_CALL
        if not _stay_where_they_should(directory, layers, experts, old_slots, new_slots, new.n_slots):
            return _BAD_CALL
        for layer in range(len(new.n_slots)):
            _leave_all(layer_view(directory, layer))
            first = int(new.first[layer])
            _free_all(new.slot_of[layer], new, first, new.n_slots[layer])
            row = HEAD + layer * ROW
            to[row + N_SLOTS] = new.n_slots[layer]
            to[row + SLOT_OF] = new.slot_of.ctypes.data + layer * new.slot_of.shape[1] * 4
            to[row + OWNER] = new.owner.ctypes.data + first * 4
            to[row + STATE] = new.state.ctypes.data + first
            to[row + PINS] = new.pins.ctypes.data + first * 4
            to[row + ORDER] = new.order.ctypes.data + first * 8
            to[row + EVICTED_BY] = new.evicted_by.ctypes.data + first * 4
        seen = 0
        view = layer_view(directory, seen)
        for i in range(len(layers)):
            if layers[i] != seen:
                seen = int(layers[i])
                view = layer_view(directory, seen)
            place = new.first[seen] + new_slots[i]
            _stay(view, new.slot_of[seen], new, experts[i], old_slots[i], new_slots[i], place)
        return 0

    return RepackCalls(choose, move)
