"""The policy's calls as Python makes them.

Compiled, each hands the arrays' addresses on to the C functions of `native.py`, so that Python and an engine run
the same machine code, and a call costs what Numba's dispatch of a few arguments costs. All keep the interpreter's
lock, and none waits for anything; the caller has the layer's lock (`locked_calls.py` takes it). Arrays are contiguous
int32; others are refused with a `TypeError`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from numba import int64, types

from expertier.compiled_functions import cached_njit
from expertier.planner.policy.outcome import Outcome
from expertier.planner.policy.tables import (
    ABORT,
    COMPILED,
    COMPLETE,
    I32,
    RELEASE,
    RESIDENT_FIRST,
    accepts,
    source_stamp,
)

if COMPILED:
    from expertier.planner.policy.calls import c_calls as how
else:
    from expertier.planner.policy.calls import interpreted as how  # type: ignore[no-redef]

_BAD_CALL = int(Outcome.BAD_CALL)

_ARRAY = types.Array(types.int32, 1, "C")
_F = TypeVar("_F", bound=Callable[..., int])


@dataclass(frozen=True, slots=True)
class PythonCalls:
    """The functions of `policy.py`; each takes a directory's address and a layer first."""

    begin: Callable[[int, int, I32, I32, I32], int]
    complete: Callable[[int, int, I32], int]
    abort: Callable[[int, int, I32], int]
    release: Callable[[int, int, I32], int]
    resident_first: Callable[[int, int, I32], int]
    begin_prefetch: Callable[[int, int, int], int]


@cache
def python_calls() -> PythonCalls:
    """Return the calls; the first time compiles them or loads them from the on-disk cache."""
    return _build(source_stamp())


def _compiled(*arguments: Any) -> Callable[[_F], _F]:
    """Compile for these arguments, at once, from the on-disk cache where that holds it."""
    return cached_njit(int64(*arguments))


def _build(stamp: int) -> PythonCalls:
    """Compile. `stamp` is a cell of each, and so part of its key in Numba's cache."""

    @_compiled(int64, int64, _ARRAY, _ARRAY, _ARRAY)
    def begin(directory: int, layer: int, experts: I32, slots: I32, miss_index: I32) -> int:
        if not accepts(directory, layer, stamp) or min(len(slots), len(miss_index)) < len(experts):
            return _BAD_CALL
        return how.begin(directory, layer, experts, slots, miss_index)

    @_compiled(int64, int64, _ARRAY)
    def complete(directory: int, layer: int, slots: I32) -> int:
        return (
            how.on_slots(directory, COMPLETE, layer, slots) if accepts(directory, layer, stamp) else _BAD_CALL
        )

    @_compiled(int64, int64, _ARRAY)
    def abort(directory: int, layer: int, slots: I32) -> int:
        return how.on_slots(directory, ABORT, layer, slots) if accepts(directory, layer, stamp) else _BAD_CALL

    @_compiled(int64, int64, _ARRAY)
    def release(directory: int, layer: int, slots: I32) -> int:
        return (
            how.on_slots(directory, RELEASE, layer, slots) if accepts(directory, layer, stamp) else _BAD_CALL
        )

    @_compiled(int64, int64, _ARRAY)
    def resident_first(directory: int, layer: int, experts: I32) -> int:
        if not accepts(directory, layer, stamp):
            return _BAD_CALL
        return how.on_slots(directory, RESIDENT_FIRST, layer, experts)

    @_compiled(int64, int64, int64)
    def begin_prefetch(directory: int, layer: int, expert: int) -> int:
        return how.on_expert(directory, layer, expert) if accepts(directory, layer, stamp) else _BAD_CALL

    return PythonCalls(begin, complete, abort, release, resident_first, begin_prefetch)
