"""How a residency's tables lie in memory: one layer's arrays as compiled code and the interpreter see them.

A directory is an int64 array: HEAD numbers for the whole model, then ROW numbers for each layer, most of them
addresses. It is all that a C caller needs (`native.py`). `layer_view` turns a layer's row into arrays.

L layers, E experts and S slots of one layer; slot numbers count from their layer's first.

    slot_of    int32[E]   an expert's slot, -1 where it has none
    heat       uint8[E]   an expert's decayed use count; it survives eviction
    owner      int32[S]   the slot's expert, -1 where it is FREE
    state      uint8[S]   bits READY (the expert's bytes are complete) and SPECULATIVE (prefetched, not used yet)
    pins       int32[S]   how many users hold the slot
    order      int64[S]   who leaves first: the policy's rank * 65536 + the slot's number
    evicted_by int32[S]   the expert that the slot's owner evicted, -1 if none
    counters   int64[9]   the columns named below
    notes      int32[N]   what the policy keeps besides; N is its own choice

`order` makes the search for a victim one minimum over a contiguous array. A FREE slot has the rank -1 and a
speculative one the rank 0; the ranks of policies are 1 and more, below 2^46.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt
from numba import config, njit, types
from numba.extending import intrinsic
from numba.np.numpy_support import carray

from expertier.planner.policy.operations import END_OF_ENTRIES, entry_of

U8: TypeAlias = npt.NDArray[np.uint8]
I32: TypeAlias = npt.NDArray[np.int32]
I64: TypeAlias = npt.NDArray[np.int64]
_F = TypeVar("_F", bound=Callable[..., object])

# Bits of `state`. FREE is `owner == -1`; FILLING is an owner without READY.
READY = 1
SPECULATIVE = 2

# Entries of `counters`. They only grow.
CALLS, HITS, MISSES, EVICTIONS, FILLS, ABORTS, PREFETCHES, USEFUL, WASTED = range(9)
N_COUNTERS = 9
COUNTER_NAMES = (
    "calls",
    "hits",
    "misses",
    "evictions",
    "fills",
    "aborts",
    "prefetches",
    "prefetches_useful",
    "prefetches_wasted",
)

# `order`.
SLOT_BITS = 16
RANK_FREE = -1
RANK_SPECULATIVE = 0
PINNED_BIT = 62
PINNED = 1 << PINNED_BIT  # above every order

# The directory's head: three numbers, then addresses of the operations' C functions. After it, a layer's row.
STAMP, N_LAYERS, KIND = range(3)
BEGIN, COMPLETE, ABORT, RELEASE = map(entry_of, ("begin", "complete", "abort", "release"))
RESIDENT_FIRST, BEGIN_PREFETCH = map(entry_of, ("resident_first", "begin_prefetch"))
HEAD = END_OF_ENTRIES
N_EXPERTS, N_SLOTS, N_NOTES = range(3)
(SLOT_OF, HEAT, OWNER, STATE, PINS, ORDER, EVICTED_BY, COUNTERS, NOTES) = range(3, 12)
ROW = 12

COMPILED = not config.DISABLE_JIT  # type: ignore[attr-defined]  # Numba sets its options at import


class LayerView(NamedTuple):
    """One layer's arrays; the module's docstring describes them."""

    slot_of: I32
    heat: U8
    owner: I32
    state: U8
    pins: I32
    order: I64
    evicted_by: I32
    counters: I64
    notes: I32


@cache
def source_stamp() -> int:
    """Return a number that changes with the policy's source: compiled callers and directories carry it.

    Numba's on-disk cache of a function would not notice a change in another file that it calls into.
    """
    here = Path(__file__).parent
    files = (
        "tables.py",
        "policy.py",
        "queries.py",
        "outcome.py",
        "repack_calls.py",
        "calls/c_calls.py",
        "calls/native.py",
        "operations.py",
        "calls/locked_calls.py",
    )
    paths = [here / name for name in files] + sorted((here / "policies").glob("*.py"))
    return zlib.crc32(b"".join(path.read_bytes() for path in paths))


def compiled(function: _F) -> _F:
    """Compile `function` as a part of its callers: they are what the on-disk cache keeps."""
    return cast(_F, njit(forceinline=True)(function))


def _address_to_pointer(_typing: Any, _address: Any) -> Any:
    """Return the type and the code generator of `_pointer`, for Numba's `intrinsic`."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), generate


_pointer: Any = intrinsic(_address_to_pointer)
"""In compiled code: an int64 address as a `void *`."""


def _interpreted_array(address: int, n: int, dtype: Any) -> Any:
    """Return the `n` numbers at `address` as an array that shares their memory."""
    n_bytes = int(n) * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_byte * n_bytes).from_address(int(address)), dtype)


@compiled
def _compiled_array(address: int, n: int, dtype: Any) -> Any:
    return carray(_pointer(address), (n,), dtype)


array_at: Callable[[int, int, Any], Any] = _compiled_array if COMPILED else _interpreted_array
"""`array_at(address, n, dtype)`: the `n` numbers at `address`, shared and not copied."""


@compiled
def layer_view(directory: int, layer: int) -> LayerView:
    """Return the arrays of a layer; `directory` is the directory's address, `layer` one that it has."""
    row = array_at(directory + (HEAD + layer * ROW) * 8, ROW, np.int64)
    n_experts, n_slots = row[N_EXPERTS], row[N_SLOTS]
    return LayerView(
        array_at(row[SLOT_OF], n_experts, np.int32),
        array_at(row[HEAT], n_experts, np.uint8),
        array_at(row[OWNER], n_slots, np.int32),
        array_at(row[STATE], n_slots, np.uint8),
        array_at(row[PINS], n_slots, np.int32),
        array_at(row[ORDER], n_slots, np.int64),
        array_at(row[EVICTED_BY], n_slots, np.int32),
        array_at(row[COUNTERS], N_COUNTERS, np.int64),
        array_at(row[NOTES], row[N_NOTES], np.int32),
    )


@compiled
def in_range(slots: I32, n: int, limit: int) -> bool:
    """Whether the first `n` of `slots` are slots of a layer that has `limit` of them."""
    if n < 0:
        return False
    for i in range(n):  # noqa: SIM110 (Numba compiles no generator inside all())
        if slots[i] < 0 or slots[i] >= limit:
            return False
    return True


@compiled
def accepts(directory: int, layer: int, stamp: int) -> bool:
    """Whether the directory is of this version of the policy, and has the layer."""
    head = array_at(directory, HEAD, np.int64)
    return bool(head[STAMP] == stamp and 0 <= layer < head[N_LAYERS])


def check_layer(view: LayerView, name: str) -> None:
    """Assert what holds for a layer between any two calls; `name` begins the messages."""
    owners = view.owner.tolist()
    taken = {expert: slot for slot, expert in enumerate(owners) if expert >= 0}
    assert len(taken) == sum(expert >= 0 for expert in owners), f"{name}: an expert in two slots"
    found = {expert: slot for expert, slot in enumerate(view.slot_of.tolist()) if slot >= 0}
    assert found == taken, f"{name}: slot_of {found} and owner {taken} disagree"
    ready = speculative = 0
    for slot, expert in enumerate(owners):
        state, pins, order = int(view.state[slot]), int(view.pins[slot]), int(view.order[slot])
        rank = order >> SLOT_BITS
        assert pins >= 0, f"{name}: slot {slot} has {pins} pins"
        assert order & ((1 << SLOT_BITS) - 1) == slot, f"{name}: slot {slot} has the order of another"
        assert (rank == RANK_FREE) == (expert < 0), f"{name}: slot {slot} of expert {expert} has rank {rank}"
        if expert < 0:
            assert (state, pins) == (0, 0), f"{name}: FREE slot {slot} is ready or pinned"
            continue
        assert state & READY or pins, f"{name}: slot {slot} is filled by no one"
        assert (rank == RANK_SPECULATIVE) == bool(state & SPECULATIVE), (
            f"{name}: slot {slot} in state {state} has rank {rank}"
        )
        ready += bool(state & READY)
        speculative += state == READY | SPECULATIVE
    counters = dict(zip(COUNTER_NAMES, view.counters.tolist(), strict=True))
    assert counters["fills"] - counters["evictions"] == ready, f"{name}: {counters}, {ready} residents"
    ended = counters["prefetches_useful"] + counters["prefetches_wasted"]
    assert counters["prefetches"] - ended == speculative, f"{name}: {counters}, {speculative} speculative"
