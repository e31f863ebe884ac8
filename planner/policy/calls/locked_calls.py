"""The policy's calls together with the layer's lock: taken, used and given back in one compiled call.

CPython looks for signals between two instructions of Python code, and a compiled call has none. So no exception comes
between taking the lock and giving it back; that matters because an engine's threads wait for the lock without a limit.

`held` is an array of n + 1 numbers: the slots of a call's n experts, and then 1 where these slots are pinned or 0 where
they are not, as at first. So an interrupted caller knows what it has to undo; a call that unpins does nothing where the
slots are not pinned. Calls that may block give up the interpreter's lock meanwhile. The `try_` calls keep it; where
another thread has the layer's lock they return BUSY and have changed nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any, TypeVar, cast

from numba import int64, types

from expertier.compiled_functions import cached_njit
from expertier.interrupts import interrupts_deferred
from expertier.planner.policy.outcome import COMPLETE_AND_RELEASE, Outcome
from expertier.planner.policy.tables import (
    BEGIN_PREFETCH,
    COMPILED,
    COMPLETE,
    I32,
    READY,
    RELEASE,
    RESIDENT_FIRST,
    LayerView,
    accepts,
    compiled,
    layer_view,
    source_stamp,
)

if COMPILED:
    from expertier.planner.policy.calls import c_calls as how
else:
    from expertier.planner.policy.calls import interpreted as how  # type: ignore[no-redef]

LOCK_BYTES = 128
CONDITION_OFFSET = 64

_BUSY = int(Outcome.BUSY)
_BAD_CALL = int(Outcome.BAD_CALL)
_BAD_EXPERT = int(Outcome.BAD_EXPERT)
_LOOK_AGAIN = int(Outcome.LOOK_AGAIN)

_ARRAY = types.Array(types.int32, 1, "C")
_F = TypeVar("_F", bound=Callable[..., int])


@dataclass(frozen=True, slots=True)
class LockedCalls:
    """The functions; each takes a directory's address, the locks' address and a layer first."""

    try_pin_hits: Callable[[int, int, int, I32, I32], int]
    try_release_held: Callable[[int, int, int, I32], int]
    try_begin_held: Callable[[int, int, int, I32, I32, I32], int]
    begin_held: Callable[[int, int, int, I32, I32, I32, int, int], int]
    try_update_held: Callable[[int, int, int, int, I32], int]
    update_held: Callable[[int, int, int, int, I32], int]
    resident_first: Callable[[int, int, int, I32], int]
    begin_prefetch: Callable[[int, int, int, int], int]


@cache
def locked_calls() -> LockedCalls:
    """Return the calls; the first time compiles them or loads them from the on-disk cache."""
    return _build(source_stamp())


def _compiled(*arguments: Any, nogil: bool = False) -> Callable[[_F], _F]:
    """Compile a function for these argument types now, or load it from the on-disk cache."""
    if not COMPILED:
        return _deferred
    return cached_njit(int64(*arguments), nogil=nogil)


def _deferred(function: _F) -> _F:
    """Defer interrupts in a function that is not compiled."""

    @wraps(function)
    def call(*arguments: Any) -> int:
        with interrupts_deferred():
            return function(*arguments)

    return cast(_F, call)


@compiled
def _is_filling(view: LayerView) -> bool:
    return bool(((view.owner >= 0) & (view.state & READY == 0)).any())


def _build(stamp: int) -> LockedCalls:
    """Compile the calls. Each is a closure over `stamp`, so `stamp` is part of its key in Numba's cache."""

    @_compiled(int64, int64, int64, _ARRAY, _ARRAY)
    def try_pin_hits(directory: int, locks: int, layer: int, experts: I32, held: I32) -> int:
        n = len(experts)
        if not accepts(directory, layer, stamp) or len(held) != n + 1:
            return _BAD_CALL
        mutex = locks + layer * LOCK_BYTES
        if how.try_lock(mutex) != 0:
            return _BUSY
        view = layer_view(directory, layer)
        status = 0
        for expert in experts:
            if expert < 0 or expert >= len(view.slot_of):
                status = _BAD_EXPERT
                break
            slot = view.slot_of[expert]
            if slot < 0 or view.state[slot] & READY == 0:
                status += 1
        if status == 0:
            status = how.begin(directory, layer, experts, held, held)  # writes no `miss_index`: all hit
            if status == 0:
                held[n] = 1
        how.unlock(mutex)
        return status

    @_compiled(int64, int64, int64, _ARRAY)
    def try_release_held(directory: int, locks: int, layer: int, held: I32) -> int:
        n = len(held) - 1
        if n < 0 or not accepts(directory, layer, stamp):
            return _BAD_CALL
        if held[n] == 0:
            return 0
        mutex = locks + layer * LOCK_BYTES
        if how.try_lock(mutex) != 0:
            return _BUSY
        status = how.on_slots(directory, RELEASE, layer, held[:n])
        if status == 0:
            held[n] = 0
            how.notify_all(mutex + CONDITION_OFFSET)
        how.unlock(mutex)
        return status

    @_compiled(int64, int64, int64, _ARRAY, _ARRAY, _ARRAY)
    def try_begin_held(
        directory: int, locks: int, layer: int, experts: I32, held: I32, miss_index: I32
    ) -> int:
        n = len(experts)
        if not accepts(directory, layer, stamp) or len(held) != n + 1 or len(miss_index) < n:
            return _BAD_CALL
        mutex = locks + layer * LOCK_BYTES
        if how.try_lock(mutex) != 0:
            return _BUSY
        status = how.begin(directory, layer, experts, held, miss_index)
        if status >= 0:
            held[n] = 1
        how.unlock(mutex)
        return status

    @_compiled(int64, int64, int64, _ARRAY, _ARRAY, _ARRAY, int64, int64, nogil=True)
    def begin_held(
        directory: int,
        locks: int,
        layer: int,
        experts: I32,
        held: I32,
        miss_index: I32,
        deadline: int,
        waits: int,
    ) -> int:
        n = len(experts)
        if not accepts(directory, layer, stamp) or len(held) != n + 1 or len(miss_index) < n:
            return _BAD_CALL
        mutex = locks + layer * LOCK_BYTES
        if how.lock(mutex) != 0:
            return _BAD_CALL
        view = layer_view(directory, layer)
        status = how.begin(directory, layer, experts, held, miss_index)
        if status == _BUSY and (waits != 0 or _is_filling(view)):
            how.wait_until(mutex + CONDITION_OFFSET, mutex, deadline)
            status = how.begin(directory, layer, experts, held, miss_index)
        if status >= 0:
            held[n] = 1
        elif status == _BUSY and _is_filling(view):
            status = _LOOK_AGAIN
        how.unlock(mutex)
        return status

    @_compiled(int64, int64, int64, int64, _ARRAY)
    def try_update_held(directory: int, locks: int, entry: int, layer: int, held: I32) -> int:
        n = len(held) - 1
        if n < 0 or not accepts(directory, layer, stamp):
            return _BAD_CALL
        if held[n] == 0:
            return 0
        mutex = locks + layer * LOCK_BYTES
        if how.try_lock(mutex) != 0:
            return _BUSY
        status = how.on_slots(
            directory, COMPLETE if entry == COMPLETE_AND_RELEASE else entry, layer, held[:n]
        )
        if status >= 0 and entry == COMPLETE_AND_RELEASE:
            status = how.on_slots(directory, RELEASE, layer, held[:n])
        if status >= 0 and entry != COMPLETE:
            held[n] = 0
        how.notify_all(mutex + CONDITION_OFFSET)
        how.unlock(mutex)
        return status

    @_compiled(int64, int64, int64, int64, _ARRAY, nogil=True)
    def update_held(directory: int, locks: int, entry: int, layer: int, held: I32) -> int:
        n = len(held) - 1
        if n < 0 or not accepts(directory, layer, stamp):
            return _BAD_CALL
        if held[n] == 0:
            return 0
        mutex = locks + layer * LOCK_BYTES
        if how.lock(mutex) != 0:
            return _BAD_CALL
        status = how.on_slots(
            directory, COMPLETE if entry == COMPLETE_AND_RELEASE else entry, layer, held[:n]
        )
        if status >= 0 and entry == COMPLETE_AND_RELEASE:
            status = how.on_slots(directory, RELEASE, layer, held[:n])
        if status >= 0 and entry != COMPLETE:
            held[n] = 0
        how.notify_all(mutex + CONDITION_OFFSET)
        how.unlock(mutex)
        return status

    @_compiled(int64, int64, int64, _ARRAY, nogil=True)
    def resident_first(directory: int, locks: int, layer: int, experts: I32) -> int:
        if not accepts(directory, layer, stamp):
            return _BAD_CALL
        mutex = locks + layer * LOCK_BYTES
        if how.lock(mutex) != 0:
            return _BAD_CALL
        status = how.on_slots(directory, RESIDENT_FIRST, layer, experts)
        how.unlock(mutex)
        return status

    @_compiled(int64, int64, int64, int64, nogil=True)
    def begin_prefetch(directory: int, locks: int, layer: int, expert: int) -> int:
        if not accepts(directory, layer, stamp):
            return _BAD_CALL
        mutex = locks + layer * LOCK_BYTES
        if how.lock(mutex) != 0:
            return _BAD_CALL
        status = how.on_expert(directory, BEGIN_PREFETCH, layer, expert)
        how.unlock(mutex)
        return status

    return LockedCalls(
        try_pin_hits,
        try_release_held,
        try_begin_held,
        begin_held,
        try_update_held,
        update_held,
        resident_first,
        begin_prefetch,
    )
