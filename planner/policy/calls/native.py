"""The policy as C function pointers: an engine's threads call it without Python and without its lock.

Each operation of the table `operations.py` becomes a C function. It takes a directory (`Residency.directory_address`)
and a layer first; the caller holds the layer's lock. It returns what the operation's function returns,
and BAD_CALL where the directory has no such layer or comes from another version of the policy. `begin` serves every
policy: it calls the `begin` of the directory's own policy.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any, cast

import numpy as np

from expertier.compiled_functions import cached_cfunc
from expertier.errors import ConfigError
from expertier.planner.policy.calls.c_calls import call_begin, signature_of
from expertier.planner.policy.calls.entry_points import EntryPoints
from expertier.planner.policy.kind import PolicyKind
from expertier.planner.policy.operations import OPERATIONS, Operation
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
_BEGIN = OPERATIONS[0]


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
    """Compile one policy's `begin`: a closure over both arguments, so both are part of its key in Numba's cache."""

    @cached_cfunc(signature_of(*_BEGIN.shape))
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
    """Compile the C functions of all operations. They are closures over `stamp`, so it is part of their cache keys."""

    @cached_cfunc(signature_of(*_BEGIN.shape))
    def begin(directory: int, layer: int, experts: int, n: int, slots: int, miss_index: int) -> int:
        head = array_at(directory, HEAD, np.int64)
        if head[STAMP] != stamp:  # the policy's own `begin` checks the layer
            return _BAD_CALL
        address = head[BEGIN]
        return call_begin(address, directory, layer, experts, n, slots, miss_index)

    templates = _templates(stamp)
    functions = {"begin": begin}
    for row in OPERATIONS[1:]:
        function = _specialised(templates[row.shape], row)
        functions[row.name] = cached_cfunc(signature_of(*row.shape))(function)
    return EntryPoints(functions)


def _templates(stamp: int) -> dict[tuple[int, int], Callable[..., int]]:
    """Return the C functions by shape (arrays, numbers), in which the global name `operation` is still to be bound."""

    def on_layer(directory: int, layer: int) -> int:
        if not accepts(directory, layer, stamp):
            return _BAD_CALL
        return operation(layer_view(directory, layer))

    def on_array(directory: int, layer: int, values: int, n: int) -> int:
        if not accepts(directory, layer, stamp):
            return _BAD_CALL
        return operation(layer_view(directory, layer), array_at(values, n, np.int32), n)

    def on_arrays(directory: int, layer: int, first: int, n: int, second: int) -> int:
        if not accepts(directory, layer, stamp):
            return _BAD_CALL
        return operation(
            layer_view(directory, layer), array_at(first, n, np.int32), n, array_at(second, n, np.int32)
        )

    def on_number(directory: int, layer: int, number: int) -> int:
        if not accepts(directory, layer, stamp):
            return _BAD_CALL
        return operation(layer_view(directory, layer), number)

    def on_numbers(directory: int, layer: int, first: int, second: int) -> int:
        if not accepts(directory, layer, stamp):
            return _BAD_CALL
        return operation(layer_view(directory, layer), first, second)

    return {(0, 0): on_layer, (1, 0): on_array, (2, 0): on_arrays, (0, 1): on_number, (0, 2): on_numbers}


def operation(*_arguments: Any) -> int:
    """Stand for the operation in a template; `_specialised` puts the real one in its place."""
    raise AssertionError("a template was called")


def _specialised(template: Callable[..., int], row: Operation) -> Callable[..., int]:
    """Return the template with the function of the table's `row` in the place of `operation`.

    The function is a global of the copy and not a cell: Numba pickles cells into the cache's key, and a compiled
    function pickles differently in each process. The name makes the key unique.
    """
    assert isinstance(template, FunctionType)
    names = {**template.__globals__, "operation": row.function()}
    copy = FunctionType(template.__code__, names, row.name, None, template.__closure__)
    copy.__module__, copy.__qualname__ = __name__, row.name
    return copy
