"""Many copies queued by one call, without Python between them.

The interpreter's lock is free meanwhile: a driver that makes its caller wait, as it does when its queue is full, holds
up that one thread, and threads that use other devices go on. With `NUMBA_DISABLE_JIT=1` the interpreter does the same.
Numba is imported with this file: import it late.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any, TypeAlias, cast

from llvmlite import ir as _ir
from numba import config, types
from numba.extending import intrinsic

from expertier.compiled_functions import cached_njit
from expertier.hip.device import Moves

CopyLoop: TypeAlias = Callable[[int, Moves, int], int]
"""`loop(address, moves, stream)` makes a driver's copy, the function at `address`, of each row of `moves`.

Rows are (target, source, bytes), in a contiguous array. Returns 0, or the first other code that a copy returned, after
which there are no more.
"""

ir: Any = _ir  # untyped

_I64 = types.int64
_COPY = types.int32(_I64, _I64, _I64, _I64)  # pointers and sizes: the C ABI passes them alike


@cache
def copy_loop() -> CopyLoop:
    """Return the loop; the first time compiles it or loads it from the on-disk cache."""
    if config.DISABLE_JIT:  # type: ignore[attr-defined]  # Numba sets its options at import
        return _interpreted
    made = cached_njit(_I64(_I64, types.Array(_I64, 2, "C"), _I64), nogil=True)(_loop)
    return cast(CopyLoop, made)


def _loop(address: int, moves: Moves, stream: int) -> int:
    for row in range(len(moves)):
        code = _call_copy(address, moves[row, 0], moves[row, 1], moves[row, 2], stream)
        if code != 0:
            return code
    return 0


def _interpreted(address: int, moves: Moves, stream: int) -> int:
    pointer = ctypes.c_void_p
    copy = ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer, ctypes.c_size_t, pointer)(address)
    for target, source, n_bytes in moves.tolist():
        code = int(copy(target, source, n_bytes, stream))
        if code:
            return code
    return 0


def _copy(_typing: Any, _address: Any, _target: Any, _source: Any, _n_bytes: Any, _stream: Any) -> Any:
    """Type and code of `_call_copy`, as Numba asks for them."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        parameters = [context.get_value_type(parameter) for parameter in _COPY.args]
        function = ir.FunctionType(context.get_value_type(_COPY.return_type), parameters)
        return builder.call(builder.inttoptr(args[0], function.as_pointer()), args[1:])

    return _COPY.return_type(_I64, *_COPY.args), generate


_call_copy = cast(Callable[..., int], intrinsic(_copy))
"""In compiled code: calls the function at its first argument with the others."""
