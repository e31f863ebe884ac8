"""The policy as C function pointers: an engine's threads call it without Python and without its lock.

Every function takes a directory (`Residency.directory_address`) first; the caller holds the layer's lock.

    int32 begin         (const int64 *directory, int32 layer, const int32 *experts, int32 n,
                         int32 *slots, int32 *miss_index)
    int32 complete      (const int64 *directory, int32 layer, const int32 *slots, int32 n)
    int32 abort         (const int64 *directory, int32 layer, const int32 *slots, int32 n)
    int32 release       (const int64 *directory, int32 layer, const int32 *slots, int32 n)
    int32 resident_first(const int64 *directory, int32 layer, int32 *experts, int32 n)

They return what the functions of `policy.py` return, and BAD_CALL for a directory that another version of the
policy made.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import cfunc, config, njit, types
from numba.extending import intrinsic
from numba.np.numpy_support import carray

from expertier.errors import ConfigError
from expertier.planner import policy
from expertier.planner.entry_points import EntryPoints
from expertier.planner.outcome import Outcome
from expertier.planner.residency import ARRAYS, DIRECTORY_HEAD

_BAD_CALL = int(Outcome.BAD_CALL)
_LENGTH = DIRECTORY_HEAD + len(ARRAYS)

# Positions in the directory.
_STAMP, _N_LAYERS, _N_EXPERTS_MAX, _N_SLOTS_ALL = range(DIRECTORY_HEAD)
(
    _SLOT_OF,
    _OWNER,
    _READY,
    _PINS,
    _HEAT,
    _LAST_USE,
    _EVICTED,
    _CLOCK,
    _FIRST,
    _N_SLOTS,
    _N_EXPERTS,
    _COUNTERS,
    _SETTINGS,
) = range(DIRECTORY_HEAD, _LENGTH)


@cache
def entry_points() -> EntryPoints:
    """Return the compiled policy's addresses; the first call compiles it or loads it from the on-disk cache.

    Raises `ConfigError` where compilation is switched off.
    """
    if config.DISABLE_JIT:  # type: ignore[attr-defined]  # Numba sets its options at import
        raise ConfigError(
            "NUMBA_DISABLE_JIT is set: the policy then runs as plain Python, which an engine's threads "
            "cannot call. Unset it to run an engine."
        )
    return _build(policy.source_stamp())


def _address_to_pointer(_typing: Any, _address: Any) -> Any:
    """Type and code of `_pointer`, as Numba asks for them."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), generate


_pointer: Any = intrinsic(_address_to_pointer)
"""In compiled code: an int64 address as a `void *`."""


@njit
def _per_slot(directory: policy.I64, index: int, dtype: Any) -> Any:
    return carray(_pointer(directory[index]), (directory[_N_SLOTS_ALL],), dtype)


@njit
def _per_layer(directory: policy.I64, index: int, dtype: Any) -> Any:
    return carray(_pointer(directory[index]), (directory[_N_LAYERS],), dtype)


@njit
def _per_expert(directory: policy.I64, index: int) -> Any:
    return carray(_pointer(directory[index]), (directory[_N_LAYERS], directory[_N_EXPERTS_MAX]), np.int32)


@njit
def _counters(directory: policy.I64) -> Any:
    return carray(_pointer(directory[_COUNTERS]), (directory[_N_LAYERS], policy.N_COUNTERS), np.int64)


def _build(stamp: int) -> EntryPoints:
    """Compile the entry points. `stamp` is a cell of each, and so part of its key in Numba's cache."""
    pointer: Any = types.CPointer
    i32, i32_pointer, i64_pointer = types.int32, pointer(types.int32), pointer(types.int64)
    on_slots = i32(i64_pointer, i32, i32_pointer, i32)

    @cfunc(i32(i64_pointer, i32, i32_pointer, i32, i32_pointer, i32_pointer), cache=True)
    def begin(address: Any, layer: int, experts: Any, n: int, slots: Any, miss_index: Any) -> int:
        directory = carray(address, (_LENGTH,))
        if directory[_STAMP] != stamp:
            return _BAD_CALL
        return policy.begin(
            layer,
            carray(experts, (n,)),
            n,
            carray(slots, (n,)),
            carray(miss_index, (n,)),
            _per_expert(directory, _SLOT_OF),
            _per_slot(directory, _OWNER, np.int32),
            _per_slot(directory, _READY, np.uint8),
            _per_slot(directory, _PINS, np.int32),
            _per_expert(directory, _HEAT),
            _per_slot(directory, _LAST_USE, np.int64),
            _per_slot(directory, _EVICTED, np.int32),
            _per_layer(directory, _CLOCK, np.int64),
            _per_layer(directory, _FIRST, np.int32),
            _per_layer(directory, _N_SLOTS, np.int32),
            _per_layer(directory, _N_EXPERTS, np.int32),
            _counters(directory),
            carray(_pointer(directory[_SETTINGS]), (policy.N_SETTINGS,), np.int64),
        )

    @cfunc(on_slots, cache=True)
    def complete(address: Any, layer: int, slots: Any, n: int) -> int:
        directory = carray(address, (_LENGTH,))
        if directory[_STAMP] != stamp:
            return _BAD_CALL
        return policy.complete(
            layer,
            carray(slots, (n,)),
            n,
            _per_slot(directory, _OWNER, np.int32),
            _per_slot(directory, _READY, np.uint8),
            _per_layer(directory, _FIRST, np.int32),
            _per_layer(directory, _N_SLOTS, np.int32),
            _counters(directory),
        )

    @cfunc(on_slots, cache=True)
    def abort(address: Any, layer: int, slots: Any, n: int) -> int:
        directory = carray(address, (_LENGTH,))
        if directory[_STAMP] != stamp:
            return _BAD_CALL
        return policy.abort(
            layer,
            carray(slots, (n,)),
            n,
            _per_expert(directory, _SLOT_OF),
            _per_slot(directory, _OWNER, np.int32),
            _per_slot(directory, _READY, np.uint8),
            _per_slot(directory, _PINS, np.int32),
            _per_layer(directory, _FIRST, np.int32),
            _per_layer(directory, _N_SLOTS, np.int32),
            _counters(directory),
        )

    @cfunc(on_slots, cache=True)
    def release(address: Any, layer: int, slots: Any, n: int) -> int:
        directory = carray(address, (_LENGTH,))
        if directory[_STAMP] != stamp:
            return _BAD_CALL
        return policy.release(
            layer,
            carray(slots, (n,)),
            n,
            _per_slot(directory, _PINS, np.int32),
            _per_layer(directory, _FIRST, np.int32),
            _per_layer(directory, _N_SLOTS, np.int32),
        )

    @cfunc(on_slots, cache=True)
    def resident_first(address: Any, layer: int, experts: Any, n: int) -> int:
        directory = carray(address, (_LENGTH,))
        if directory[_STAMP] != stamp:
            return _BAD_CALL
        return policy.resident_first(
            layer,
            carray(experts, (n,)),
            n,
            _per_expert(directory, _SLOT_OF),
            _per_layer(directory, _N_EXPERTS, np.int32),
        )

    functions: dict[str, Any] = {
        "begin": begin,
        "complete": complete,
        "abort": abort,
        "release": release,
        "resident_first": resident_first,
    }
    addresses: dict[str, int] = {name: function.address for name, function in functions.items()}
    return EntryPoints(**addresses, _owners=tuple(functions.values()))
