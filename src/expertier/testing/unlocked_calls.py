"""The policy's calls of a residency without the layer's lock, for tests and benchmarks.

    unlocked(residency).begin(layer, experts, slots, miss_index)

Each compiled call hands the arrays' addresses on to the C functions of `planner/policy/calls/native.py`, so that it
runs the machine code that an engine runs. Each call keeps the interpreter's lock and waits for nothing. Where other
threads use the layer, the caller holds its lock; `Residency` has the calls that take the lock themselves. Arrays are
contiguous int32; other arrays are refused with a `TypeError`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeAlias, TypeVar

from numba import int64, types

from expertier.compiled_functions import cached_njit
from expertier.planner.policy.operations import IN_DIRECTORY, entry_of
from expertier.planner.policy.outcome import Outcome
from expertier.planner.policy.residency import Residency
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


class UnlockedCalls:
    """The calls on one residency. `slots`, `miss_index` and `experts` are contiguous int32 arrays."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._calls = python_calls()

    def begin(self, layer: int, experts: I32, slots: I32, miss_index: I32) -> int:
        """Look up and pin `experts`; see `policy.begin_for`. `slots` and `miss_index` are at least as long."""
        return self._calls["begin"](self._residency.directory_address, layer, experts, slots, miss_index)

    def begin_prefetch(self, layer: int, expert: int) -> int:
        """Choose a slot for an expert that no call has asked for; see `policy.begin_prefetch`."""
        return self._calls["begin_prefetch"](self._residency.directory_address, layer, expert)

    def complete(self, layer: int, slots: I32) -> int:
        """Make FILLING slots READY; see `policy.complete`."""
        return self._calls["complete"](self._residency.directory_address, layer, slots)

    def abort(self, layer: int, slots: I32) -> int:
        """Undo a `begin` or `begin_prefetch` whose fill failed; see `policy.abort`."""
        return self._calls["abort"](self._residency.directory_address, layer, slots)

    def release(self, layer: int, slots: I32) -> int:
        """Unpin slots; see `policy.release`."""
        return self._calls["release"](self._residency.directory_address, layer, slots)

    def resident_first(self, layer: int, experts: I32) -> int:
        """Reorder `experts` in place; see `queries.resident_first`."""
        return self._calls["resident_first"](self._residency.directory_address, layer, experts)


def unlocked(residency: Residency) -> UnlockedCalls:
    """Return the calls on a residency."""
    return UnlockedCalls(residency)


@cache
def python_calls() -> PythonCalls:
    """Return the calls; the first time compiles them or loads them from the on-disk cache."""
    stamp = source_stamp()
    makers = {(1, 0): _on_slots, (0, 1): _on_expert}
    without_begin = [row for row in IN_DIRECTORY if row.name != "begin"]
    return {"begin": _begin(stamp)} | {
        row.name: makers[row.shape](entry_of(row.name), stamp) for row in without_begin
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
