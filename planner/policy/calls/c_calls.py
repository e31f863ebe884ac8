"""Calls of C functions from compiled code: the policy's, by the addresses in a directory, and libc's on locks.

`interpreted.py` has the same functions for `NUMBA_DISABLE_JIT=1`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from llvmlite import ir as _ir
from numba import types
from numba.extending import intrinsic

from expertier.planner.policy.tables import BEGIN, HEAD, I32, array_at, compiled

_I32, _I64 = types.int32, types.int64

# Pointers are int64 on both sides: the directory's own entries are such, and the C ABI passes them alike.
_ARRAYS: dict[int, tuple[Any, ...]] = {
    0: (),
    1: (_I64, _I32),
    2: (_I64, _I32, _I64),
    3: (_I64, _I32, _I64, _I64),
}


def signature_of(n_arrays: int, n_numbers: int) -> Any:
    """Return the signature of the C functions of operations with so many arrays and single numbers."""
    return _I32(_I64, _I32, *_ARRAYS[n_arrays], *[_I32] * n_numbers)


_BEGIN, _ON_SLOTS, _ON_EXPERT = signature_of(3, 0), signature_of(1, 0), signature_of(0, 1)
_ON_LOCK = _I32(_I64)

ir: Any = _ir  # untyped

lock: Any = types.ExternalFunction("pthread_mutex_lock", _ON_LOCK)
try_lock: Any = types.ExternalFunction("pthread_mutex_trylock", _ON_LOCK)
wait_until: Any = types.ExternalFunction("pthread_cond_timedwait", _I32(_I64, _I64, _I64))
unlock: Any = types.ExternalFunction("pthread_mutex_unlock", _ON_LOCK)
notify_all: Any = types.ExternalFunction("pthread_cond_broadcast", _ON_LOCK)


def _call(signature: Any) -> Any:
    """Return the type and the code generator of a call `(address, *arguments)`, for Numba's `intrinsic`."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        parameters = [context.get_value_type(parameter) for parameter in signature.args]
        function = ir.FunctionType(context.get_value_type(signature.return_type), parameters)
        return builder.call(builder.inttoptr(args[0], function.as_pointer()), args[1:])

    return _I32(_I64, *signature.args), generate


def _begin(
    _typing: Any,
    _address: Any,
    _directory: Any,
    _layer: Any,
    _experts: Any,
    _n: Any,
    _slots: Any,
    _miss_index: Any,
) -> Any:
    return _call(_BEGIN)


def _on_slots(_typing: Any, _address: Any, _directory: Any, _layer: Any, _slots: Any, _n: Any) -> Any:
    return _call(_ON_SLOTS)


def _on_expert(_typing: Any, _address: Any, _directory: Any, _layer: Any, _expert: Any) -> Any:
    return _call(_ON_EXPERT)


call_begin = cast(Callable[..., int], intrinsic(_begin))
"""In compiled code: `call_begin(address, ...)` calls the `begin` at an address with the rest."""

_call_on_slots = cast(Callable[..., int], intrinsic(_on_slots))
_call_on_expert = cast(Callable[..., int], intrinsic(_on_expert))


@compiled
def begin(directory: int, layer: int, experts: I32, slots: I32, miss_index: I32) -> int:
    """Call the `begin` of the directory's policy."""
    address = array_at(directory, HEAD, np.int64)[BEGIN]
    return call_begin(
        address,
        directory,
        layer,
        experts.ctypes.data,
        len(experts),
        slots.ctypes.data,
        miss_index.ctypes.data,
    )


@compiled
def on_slots(directory: int, entry: int, layer: int, slots: I32) -> int:
    """Call the directory's function at `entry` on slots (or experts)."""
    address = array_at(directory, HEAD, np.int64)[entry]
    return _call_on_slots(address, directory, layer, slots.ctypes.data, len(slots))


@compiled
def on_expert(directory: int, entry: int, layer: int, expert: int) -> int:
    """Call the directory's function at `entry` on an expert."""
    address = array_at(directory, HEAD, np.int64)[entry]
    return _call_on_expert(address, directory, layer, expert)
