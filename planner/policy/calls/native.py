"""The policy as C function pointers: an engine's threads call it without Python and without its lock.

Every function takes a directory (`Residency.directory_address`) first; the caller holds the layer's lock.

    int32 begin         (const int64 *directory, int32 layer, const int32 *experts, int32 n,
                         int32 *slots, int32 *miss_index)
    int32 complete      (const int64 *directory, int32 layer, const int32 *slots, int32 n)
    int32 abort         (const int64 *directory, int32 layer, const int32 *slots, int32 n)
    int32 release       (const int64 *directory, int32 layer, const int32 *slots, int32 n)
    int32 resident_first(const int64 *directory, int32 layer, int32 *experts, int32 n)
    int32 begin_prefetch(const int64 *directory, int32 layer, int32 expert)
    int32 begin_prefetch_into(const int64 *directory, int32 layer, int32 expert, int32 slot)
    int32 victims       (const int64 *directory, int32 layer, int32 *slots, int32 n, int32 *experts)
    int32 pin_ready    (const int64 *directory, int32 layer, const int32 *experts, int32 n, int32 *slots)
    int32 is_fully_resident      (const int64 *directory, int32 layer)
    int32 version       (const int64 *directory, int32 layer)
    int32 evicted_by      (const int64 *directory, int32 layer, const int32 *slots, int32 n, int32 *experts)

They return what the functions of `policy.py` return, and BAD_CALL for a layer that is not there or a directory
that another version of the policy made. `begin` serves every policy: it goes on to that of the directory.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any, cast

import numpy as np

from expertier.compiled_functions import cached_cfunc
from expertier.errors import ConfigError
from expertier.planner.policy import policy
from expertier.planner.policy.calls.c_calls import (
    BEGIN_SIGNATURE,
    HOLD_SIGNATURE,
    INTO_SLOT_SIGNATURE,
    ON_EXPERT_SIGNATURE,
    ON_LAYER_SIGNATURE,
    ON_SLOTS_SIGNATURE,
    call_begin,
)
from expertier.planner.policy.calls.entry_points import EntryPoints
from expertier.planner.policy.kind import PolicyKind
from expertier.planner.policy.outcome import Outcome
from expertier.planner.policy.rule import Rule
from expertier.planner.policy.tables import (
    BEGIN,
    COMPILED,
    HEAD,
    STAMP,
    accepts,
    array_at,
    layer_view,
    source_stamp,
)

_BAD_CALL = int(Outcome.BAD_CALL)


@cache
def entry_points() -> EntryPoints:
    """Return the compiled policy's addresses; the first call compiles it or loads it from the on-disk cache.

    Raises `ConfigError` where compilation is switched off.
    """
    _require_compilation()
    return _build(source_stamp())


@cache
def begin_of(kind: PolicyKind) -> Any:
    """Return one policy's own `begin` as a C function; its `address` is what a directory holds.

    Raises `ConfigError` where compilation is switched off.
    """
    _require_compilation()
    return _build_begin(rule_of(kind), source_stamp())


def rule_of(kind: PolicyKind) -> Rule:
    """Import the policy's module."""
    return cast(Rule, importlib.import_module(kind.module))


def _require_compilation() -> None:
    if not COMPILED:
        raise ConfigError(
            "NUMBA_DISABLE_JIT is set: the policy then runs as plain Python, which an engine's threads "
            "cannot call. Unset it to run an engine."
        )


def _build_begin(rule: Rule, stamp: int) -> Any:
    """Compile one policy's `begin`. Both arguments are cells, and so part of its key in Numba's cache."""

    @cached_cfunc(BEGIN_SIGNATURE)
    def begin(directory: int, layer: int, experts: int, n: int, slots: int, miss_index: int) -> int:
        if not accepts(directory, layer, stamp):
            return _BAD_CALL
        status: int = rule.begin(
            layer_view(directory, layer),
            array_at(experts, n, np.int32),
            n,
            array_at(slots, n, np.int32),
            array_at(miss_index, n, np.int32),
        )
        return status

    return begin


def _build(stamp: int) -> EntryPoints:
    """Compile what serves every policy."""

    @cached_cfunc(BEGIN_SIGNATURE)
    def begin(directory: int, layer: int, experts: int, n: int, slots: int, miss_index: int) -> int:
        head = array_at(directory, HEAD, np.int64)
        if head[STAMP] != stamp:  # the policy's own `begin` checks the layer
            return _BAD_CALL
        address = head[BEGIN]
        return call_begin(address, directory, layer, experts, n, slots, miss_index)

    @cached_cfunc(ON_SLOTS_SIGNATURE)
    def complete(directory: int, layer: int, slots: int, n: int) -> int:
        if not accepts(directory, layer, stamp):
            return _BAD_CALL
        return policy.complete(layer_view(directory, layer), array_at(slots, n, np.int32), n)

    @cached_cfunc(ON_SLOTS_SIGNATURE)
    def abort(directory: int, layer: int, slots: int, n: int) -> int:
        if not accepts(directory, layer, stamp):
            return _BAD_CALL
        return policy.abort(layer_view(directory, layer), array_at(slots, n, np.int32), n)

    @cached_cfunc(ON_SLOTS_SIGNATURE)
    def release(directory: int, layer: int, slots: int, n: int) -> int:
        if not accepts(directory, layer, stamp):
            return _BAD_CALL
        return policy.release(layer_view(directory, layer), array_at(slots, n, np.int32), n)

    @cached_cfunc(ON_SLOTS_SIGNATURE)
    def resident_first(directory: int, layer: int, experts: int, n: int) -> int:
        if not accepts(directory, layer, stamp):
            return _BAD_CALL
        return policy.resident_first(layer_view(directory, layer), array_at(experts, n, np.int32), n)

    @cached_cfunc(ON_EXPERT_SIGNATURE)
    def begin_prefetch(directory: int, layer: int, expert: int) -> int:
        if not accepts(directory, layer, stamp):
            return _BAD_CALL
        return policy.begin_prefetch(layer_view(directory, layer), expert)

    @cached_cfunc(INTO_SLOT_SIGNATURE)
    def begin_prefetch_into(directory: int, layer: int, expert: int, slot: int) -> int:
        if not accepts(directory, layer, stamp):
            return _BAD_CALL
        return policy.begin_prefetch_into(layer_view(directory, layer), expert, slot)

    @cached_cfunc(HOLD_SIGNATURE)
    def victims(directory: int, layer: int, slots: int, n: int, experts: int) -> int:
        if not accepts(directory, layer, stamp):
            return _BAD_CALL
        return policy.victims(
            layer_view(directory, layer), array_at(slots, n, np.int32), n, array_at(experts, n, np.int32)
        )

    @cached_cfunc(HOLD_SIGNATURE)
    def pin_ready(directory: int, layer: int, experts: int, n: int, slots: int) -> int:
        if not accepts(directory, layer, stamp):
            return _BAD_CALL
        return policy.pin_ready(
            layer_view(directory, layer), array_at(experts, n, np.int32), n, array_at(slots, n, np.int32)
        )

    @cached_cfunc(ON_LAYER_SIGNATURE)
    def is_fully_resident(directory: int, layer: int) -> int:
        if not accepts(directory, layer, stamp):
            return _BAD_CALL
        return policy.is_fully_resident(layer_view(directory, layer))

    @cached_cfunc(ON_LAYER_SIGNATURE)
    def version(directory: int, layer: int) -> int:
        if not accepts(directory, layer, stamp):
            return _BAD_CALL
        return policy.version(layer_view(directory, layer))

    @cached_cfunc(HOLD_SIGNATURE)
    def evicted_by(directory: int, layer: int, slots: int, n: int, experts: int) -> int:
        if not accepts(directory, layer, stamp):
            return _BAD_CALL
        return policy.evicted_by(
            layer_view(directory, layer), array_at(slots, n, np.int32), n, array_at(experts, n, np.int32)
        )

    functions: dict[str, Any] = {
        "begin": begin,
        "complete": complete,
        "abort": abort,
        "release": release,
        "resident_first": resident_first,
        "begin_prefetch": begin_prefetch,
        "begin_prefetch_into": begin_prefetch_into,
        "victims": victims,
        "pin_ready": pin_ready,
        "is_fully_resident": is_fully_resident,
        "version": version,
        "evicted_by": evicted_by,
    }
    addresses: dict[str, int] = {name: function.address for name, function in functions.items()}
    return EntryPoints(**addresses, _owners=tuple(functions.values()))
