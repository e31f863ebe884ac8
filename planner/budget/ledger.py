"""The ledger of a device's memory: what each consumer takes, and so what is left for experts.

    weights │ kv │ draft │ prefill stream │ peers │ headroom │ reserve │ compute narrow │ compute wide │ arena │ unused
                                                                        └───────────── the slab ───────────────┘

Every byte stands in one entry, and all entries together with the unused bytes are the device's memory. A wide batch
computes in the same place as a narrow one, so `compute wide` is only what it needs beyond `compute narrow`. While
batches are narrow, slots lie in that part as well, and the arena is larger by it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from expertier.errors import BudgetError
from expertier.planner.budget.allocate import floor_bytes, full_bytes
from expertier.planner.budget.demand import LayerDemand
from expertier.planner.budget.limited_by import LimitedBy
from expertier.units import MIB, mib, mib_needed


class Consumer(StrEnum):
    """A consumer of a device's memory."""

    WEIGHTS = "weights"
    """All weights that lie where the layers run, except experts."""

    KV = "kv"
    DRAFT = "draft"
    """A draft model, with its context."""

    PREFILL_STREAM = "prefill stream"
    """Where large batches' layers pass through."""

    PEERS = "peers"
    """Buffers for copies between devices."""

    HEADROOM = "headroom"
    """Memory for the driver, its kernels and the BLAS libraries."""

    RESERVE = "reserve"
    """Memory that the user wants to be left free."""

    COMPUTE_NARROW = "compute narrow"
    COMPUTE_WIDE = "compute wide"
    """What a wide batch needs beyond what a narrow one needs."""

    ARENA = "arena"
    """Slots for experts."""


@dataclass(frozen=True, slots=True)
class DeviceNeeds:
    """What the consumers of a device need, in bytes; `compute_wide` is all that a wide batch needs.

    `free` is what the driver says is free now. `taken` has what consumers have allocated already. These bytes are not
    in `free` any more, and they count instead of the need, so that a key-value cache that exists is not reserved again.
    Raises `ValueError` for numbers below 0.
    """

    free: int
    weights: int = 0
    kv: int = 0
    compute_narrow: int = 0
    compute_wide: int = 0
    draft: int = 0
    headroom: int = 0
    prefill_stream: int = 0
    peers: int = 0
    reserve: int = 0
    taken: Mapping[Consumer, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse numbers below 0, and an arena that is taken before it is planned."""
        if min(self.free, *self._needs().values(), *self.taken.values()) < 0:
            raise ValueError(f"some needs are below 0: {self}")
        if Consumer.ARENA in self.taken:
            raise ValueError("the arena is what is planned: it cannot be taken already")

    @property
    def total(self) -> int:
        """The bytes that are shared out: free bytes, and the bytes that consumers have taken already."""
        return self.free + sum(self.taken.values())

    def reserved(self) -> dict[Consumer, int]:
        """Return the bytes of each consumer: what it has taken, else what it needs."""
        return {consumer: self.taken.get(consumer, need) for consumer, need in self._needs().items()}

    def _needs(self) -> dict[Consumer, int]:
        return {
            Consumer.WEIGHTS: self.weights,
            Consumer.KV: self.kv,
            Consumer.DRAFT: self.draft,
            Consumer.PREFILL_STREAM: self.prefill_stream,
            Consumer.PEERS: self.peers,
            Consumer.HEADROOM: self.headroom,
            Consumer.RESERVE: self.reserve,
            Consumer.COMPUTE_NARROW: self.compute_narrow,
            Consumer.COMPUTE_WIDE: max(self.compute_wide - self.compute_narrow, 0),
        }


@dataclass(frozen=True, slots=True)
class DeviceLedger:
    """Who gets how much of a device. The arena is what a wide batch leaves of the slab; a narrow one leaves more.

    An engine whose buffers do not lie in the slab (`computes_in_slab`) keeps them apart, and the arena never grows.
    """

    total_bytes: int
    entries: Mapping[Consumer, int]
    taken: Mapping[Consumer, int]
    limited_by: LimitedBy
    full_bytes: int
    floor_bytes: int
    computes_in_slab: bool = True

    @property
    def arena_bytes(self) -> int:
        """Bytes for slots while a wide batch runs."""
        return self.entries[Consumer.ARENA]

    @property
    def arena_narrow_bytes(self) -> int:
        """Bytes for slots while batches are narrow."""
        if not self.computes_in_slab:
            return self.arena_bytes
        return min(self.arena_bytes + self.entries[Consumer.COMPUTE_WIDE], self.full_bytes)

    @property
    def slab_bytes(self) -> int:
        """Bytes of one allocation for the slots, and for the engine's compute buffers where these lie below them."""
        if not self.computes_in_slab:
            return self.arena_bytes
        return self.arena_bytes + self.entries[Consumer.COMPUTE_NARROW] + self.entries[Consumer.COMPUTE_WIDE]

    @property
    def unused_bytes(self) -> int:
        """Bytes that no consumer takes: every expert has a slot, or the arena is as large as the user allows."""
        return self.total_bytes - sum(self.entries.values())

    def check_valid(self) -> None:
        """Assert that every byte stands in one entry, and that the entries are no more than the memory."""
        assert set(self.entries) == set(Consumer), self.entries
        assert min(self.entries.values()) >= 0, self.entries
        assert self.unused_bytes >= 0, "more is shared out than there is"
        assert self.floor_bytes <= self.arena_bytes <= self.full_bytes, "the arena is within its bounds"
        assert (self.limited_by is LimitedBy.SLOTS) == (self.arena_bytes == self.full_bytes)
        if self.limited_by is LimitedBy.RESERVE:
            assert self.unused_bytes == 0, "memory binds, and some is left"
        for consumer, n_bytes in self.taken.items():
            assert self.entries[consumer] == n_bytes, f"{consumer} is reserved again"

    def line(self) -> str:
        """Return it as one line for a log."""
        shares = ", ".join(
            f"{consumer} {mib(n_bytes)}" for consumer, n_bytes in self.entries.items() if n_bytes
        )
        return f"{mib(self.total_bytes)} of the device: {shares}; limited by {self.limited_by}"

    def as_dict(self) -> dict[str, Any]:
        """Return all of it by name, for `--json`."""
        return {
            "total_bytes": self.total_bytes,
            "entries": {str(consumer): n_bytes for consumer, n_bytes in self.entries.items()},
            "taken": {str(consumer): n_bytes for consumer, n_bytes in self.taken.items()},
            "unused_bytes": self.unused_bytes,
            "arena_narrow_bytes": self.arena_narrow_bytes,
            "slab_bytes": self.slab_bytes,
            "limited_by": str(self.limited_by),
        }


def plan_device(
    needs: DeviceNeeds,
    demands: Sequence[LayerDemand],
    *,
    cap_bytes: int | None = None,
    asked_bytes: int | None = None,
) -> DeviceLedger:
    """Share a device's memory out: the consumers get what they need, and experts get the rest.

    The arena has at most `cap_bytes`, at most `asked_bytes` where the user gave its size, and at most a slot for every
    expert. Raises `BudgetError` where less than one slot a layer is left, or less than was asked for. The
    message says what each consumer takes, and the smallest memory, cap or size that works.
    """
    floor, full = floor_bytes(demands), full_bytes(demands)
    reserved = needs.reserved()
    room = needs.total - sum(reserved.values())
    if room < floor:
        raise BudgetError(
            f"one expert slot in each of {len(demands)} layers takes {mib(floor)}; of {mib(needs.total)} on the device "
            f"{_shared_out(reserved)} leave {mib(max(room, 0))}: give it at least "
            f"{mib_needed(sum(reserved.values()) + floor)} MiB, or lower the context length, the batch or the reserve"
        )
    for bound, name in ((cap_bytes, "MOE_POOL_CAP_MIB"), (asked_bytes, "MOE_EXPERT_CACHE_MIB")):
        if bound is not None and bound < floor:
            raise BudgetError(
                f"asked for {bound / MIB:.3f} MiB of expert slots, but one slot in each of {len(demands)} layers takes "
                f"{mib(floor)}: set {name} to at least {mib_needed(floor)}"
            )
    if asked_bytes is not None and min(asked_bytes, full) > room:
        raise BudgetError(
            f"asked for {mib(min(asked_bytes, full))} of expert slots, but of {mib(needs.total)} on the device "
            f"{_shared_out(reserved)} leave {mib(room)}: set MOE_EXPERT_CACHE_MIB to at most {room // MIB}, or to "
            "`auto`"
        )
    bounds = {LimitedBy.SLOTS: full, LimitedBy.RESERVE: room}
    if cap_bytes is not None:
        bounds[LimitedBy.CAP] = cap_bytes
    if asked_bytes is not None:
        bounds[LimitedBy.POOL] = asked_bytes
    limited_by = min(bounds, key=lambda limit: bounds[limit])  # of equal ones the first: SLOTS before others
    ledger = DeviceLedger(
        total_bytes=needs.total,
        entries={**reserved, Consumer.ARENA: bounds[limited_by]},
        taken=dict(needs.taken),
        limited_by=limited_by,
        full_bytes=full,
        floor_bytes=floor,
    )
    ledger.check_valid()
    return ledger


def _shared_out(reserved: Mapping[Consumer, int]) -> str:
    """Return the consumers with what they take, the largest first."""
    some = sorted((item for item in reserved.items() if item[1]), key=lambda item: -item[1])
    return ", ".join(f"{consumer} ({mib(n_bytes)})" for consumer, n_bytes in some) or "no other consumers"
