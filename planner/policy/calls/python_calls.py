"""The policy's calls as Python makes them.

Compiled, each hands the arrays' addresses on to the C functions of `native.py`, so that Python and an engine run
the same machine code, and a call costs what Numba's dispatch of a few arguments costs. All keep the interpreter's
lock, and none waits for anything; the caller has the layer's lock (`locked_calls.py` takes it). Arrays are contiguous
int32; others are refused with a `TypeError`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeAlias, TypeVar

from numba import int64, types

from expertier.compiled_functions import cached_njit
from expertier.planner.policy.operations import IN_DIRECTORY, entry_of
from expertier.planner.policy.outcome import Outcome
from expertier.planner.policy.tables import COMPILED, I32, accepts, source_stamp

if COMPILED:
    from expertier.planner.policy.calls import c_calls as how
else:
    from expertier.planner.policy.calls import interpreted as how  # type: ignore[no-redef]

_BAD_CALL = int(Outcome.BAD_CALL)

_ARRAY = types.Array(types.int32, 1, "C")
_F = TypeVar("_F", bound=Callable[..., int])


PythonCalls: TypeAlias = Mapping[str, Callable[..., int]]
"""The operations that directories hold, by name. Each call takes a directory's address and a layer first."""


@cache
def python_calls() -> PythonCalls:
    """Return the calls; the first time compiles them or loads them from the on-disk cache."""
    stamp = source_stamp()
    makers = {(1, 0): _on_slots, (0, 1): _on_expert}
    others = [row for row in IN_DIRECTORY if row.name != "begin"]
    return {"begin": _begin(stamp)} | {
        row.name: makers[row.shape](entry_of(row.name), stamp) for row in others
    }


def _compiled(*arguments: Any) -> Callable[[_F], _F]:
    """Compile for these arguments, at once, from the on-disk cache where that holds it."""
    return cached_njit(int64(*arguments))


# The arguments of the following are cells of what they compile, and so part of its key in Numba's cache.


def _begin(stamp: int) -> Callable[..., int]:
    """Compile `begin`."""

    @_compiled(int64, int64, _ARRAY, _ARRAY, _ARRAY)
    def begin(directory: int, layer: int, experts: I32, slots: I32, miss_index: I32) -> int:
        if not accepts(directory, layer, stamp) or min(len(slots), len(miss_index)) < len(experts):
            return _BAD_CALL
        return how.begin(directory, layer, experts, slots, miss_index)

    return begin


def _on_slots(entry: int, stamp: int) -> Callable[..., int]:
    """Compile the operation at `entry`, which takes an array."""

    @_compiled(int64, int64, _ARRAY)
    def on_slots(directory: int, layer: int, slots: I32) -> int:
        return how.on_slots(directory, entry, layer, slots) if accepts(directory, layer, stamp) else _BAD_CALL

    return on_slots


def _on_expert(entry: int, stamp: int) -> Callable[..., int]:
    """Compile the operation at `entry`, which takes an expert."""

    @_compiled(int64, int64, int64)
    def on_expert(directory: int, layer: int, expert: int) -> int:
        return (
            how.on_expert(directory, entry, layer, expert) if accepts(directory, layer, stamp) else _BAD_CALL
        )

    return on_expert
