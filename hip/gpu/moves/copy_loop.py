"""A compiled loop that queues many copies in one call.

The interpreter's lock is released during the call. A driver may make its caller wait, for instance while its queue is
full; then only that thread waits, and threads that use other devices go on. With `NUMBA_DISABLE_JIT=1` an ordinary
Python loop does the same. This file imports Numba, so import it late.
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
"""`loop(address, moves, stream)` calls the driver's copy function, which lies at `address`, for each row of `moves`.

`moves` is a contiguous array with rows (target, source, bytes). The loop returns 0, or ends at the first copy that
returns another code and returns that code.
"""

ir: Any = _ir  # untyped

_I64 = types.int64
_COPY = types.int32(_I64, _I64, _I64, _I64)  # the C ABI passes pointers and sizes like 64-bit integers


@cache
def copy_loop() -> CopyLoop:
    """Return the loop. The first call compiles it, or loads it from the on-disk cache."""
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
    """Return the type and the code generator of `_call_copy`, for Numba's `intrinsic`."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        parameters = [context.get_value_type(parameter) for parameter in _COPY.args]
        function = ir.FunctionType(context.get_value_type(_COPY.return_type), parameters)
        return builder.call(builder.inttoptr(args[0], function.as_pointer()), args[1:])

    return _COPY.return_type(_I64, *_COPY.args), generate


_call_copy = cast(Callable[..., int], intrinsic(_copy))
"""For compiled code only: calls the function whose address is the first argument with the other arguments."""
