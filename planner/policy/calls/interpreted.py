"""The functions of `c_calls.py` where Numba compiles nothing (`NUMBA_DISABLE_JIT=1`)."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable
from typing import Any, cast

import numpy as np

from expertier.planner.policy.kind import PolicyKind
from expertier.planner.policy.operations import IN_DIRECTORY, entry_of
from expertier.planner.policy.outcome import Outcome
from expertier.planner.policy.rule import Rule
from expertier.planner.policy.tables import (
    HEAD,
    I32,
    KIND,
    accepts,
    array_at,
    layer_view,
    source_stamp,
)

_libc: Any = ctypes.PyDLL(None)  # keeps the interpreter's lock, as compiled code does
_blocking: Any = ctypes.CDLL(None)
_FUNCTIONS: dict[int, Callable[..., int]] = {
    entry_of(operation.name): operation.function() for operation in IN_DIRECTORY if operation.name != "begin"
}


def lock(mutex: int) -> int:
    """Call `pthread_mutex_lock`."""
    return int(_blocking.pthread_mutex_lock(ctypes.c_void_p(mutex)))


def wait_until(condition: int, mutex: int, deadline: int) -> int:
    """Call `pthread_cond_timedwait`."""
    return int(_blocking.pthread_cond_timedwait(*map(ctypes.c_void_p, (condition, mutex, deadline))))


def try_lock(mutex: int) -> int:
    """Call `pthread_mutex_trylock`."""
    return int(_libc.pthread_mutex_trylock(ctypes.c_void_p(mutex)))


def unlock(mutex: int) -> int:
    """Call `pthread_mutex_unlock`."""
    return int(_libc.pthread_mutex_unlock(ctypes.c_void_p(mutex)))


def notify_all(condition: int) -> int:
    """Call `pthread_cond_broadcast`."""
    return int(_libc.pthread_cond_broadcast(ctypes.c_void_p(condition)))


def begin(directory: int, layer: int, experts: I32, slots: I32, miss_index: I32) -> int:
    """Call the `begin` of the directory's policy."""
    if not accepts(directory, layer, source_stamp()):
        return int(Outcome.BAD_CALL)
    kind = list(PolicyKind)[array_at(directory, HEAD, np.int64)[KIND]]
    rule = cast(Rule, importlib.import_module(kind.module))
    return int(rule.begin(layer_view(directory, layer), experts, len(experts), slots, miss_index))


def on_slots(directory: int, entry: int, layer: int, slots: I32) -> int:
    """Call the function of `entry` on slots (or experts)."""
    if not accepts(directory, layer, source_stamp()):
        return int(Outcome.BAD_CALL)
    return int(_FUNCTIONS[entry](layer_view(directory, layer), slots, len(slots)))


def on_expert(directory: int, entry: int, layer: int, expert: int) -> int:
    """Call the function of `entry` on an expert."""
    if not accepts(directory, layer, source_stamp()):
        return int(Outcome.BAD_CALL)
    return int(_FUNCTIONS[entry](layer_view(directory, layer), expert))
