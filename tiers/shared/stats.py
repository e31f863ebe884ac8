"""What the tiers count: bytes beside hits, by cause. Counters only grow; sizes are as of the moment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class L1Stats:
    """The slots on the device.

    `used_bytes` is what the layers' ranges take of the slab, `compute_bytes` what is reserved for computing,
    `rounding_bytes` the rest, which is too small for a slot or waits to be planned. `memory_bytes` is the memory
    under the slab, which may come in chunks. `bytes_in` are the expert bytes of completed fills; every request
    for an expert is a hit or a miss.
    """

    budget_bytes: int
    used_bytes: int
    compute_bytes: int
    rounding_bytes: int
    memory_bytes: int
    slots: int
    hits: int
    misses: int
    evictions: int
    bytes_in: int


@dataclass(frozen=True, slots=True)
class L2Stats:
    """The pool of host memory.

    `used_bytes` and `peak_bytes` (the most ever) are what the allocator took for the pool, fills in flight
    included; `bounce_bytes` is the fixed minimum beside it. `rounding_bytes` of the used ones hold no expert,
    however full the pool is: they are what pages and the allocator round up. Hits and misses count the fills
    of L1 while the pool is on. `ahead_fills` experts of `ahead_bytes` were read into free room before anyone
    asked (`pool_filling.py`); `bytes_in` has them, too. `refusals` are failed allocations, and `given_back_bytes`
    were freed for other pools, for a smaller budget, or because the machine ran short.
    """

    budget_bytes: int
    used_bytes: int
    peak_bytes: int
    bounce_bytes: int
    rounding_bytes: int
    hits: int
    misses: int
    evictions: int
    bytes_in: int
    ahead_fills: int
    ahead_bytes: int
    refusals: int
    given_back_bytes: int


@dataclass(frozen=True, slots=True)
class FileStats:
    """The model's file: `reads` that gave all their bytes, and `failures` that did not."""

    bytes_read: int
    reads: int
    failures: int


@dataclass(frozen=True, slots=True)
class MoveStats:
    """Moves of the boundary or of quotas: how many, bytes copied within the device, and experts dropped."""

    moves: int = 0
    moved_bytes: int = 0
    dropped: int = 0

    def plus(self, *, moves: int, moved_bytes: int, dropped: int) -> MoveStats:
        """Return the sums."""
        return MoveStats(self.moves + moves, self.moved_bytes + moved_bytes, self.dropped + dropped)


@dataclass(frozen=True, slots=True)
class PrefetchStats:
    """Experts that were fetched before anyone asked for them.

    Of what was `asked` (and not there already), `done` arrived; `dropped` was cancelled or in the way, and
    `failed` could not be read. Of the bytes of what arrived in L1, `useful_bytes` were then asked for and
    `wasted_bytes` left unused.
    """

    asked: int = 0
    done: int = 0
    dropped: int = 0
    failed: int = 0
    useful_bytes: int = 0
    wasted_bytes: int = 0


@dataclass(frozen=True, slots=True)
class TierStats:
    """A snapshot of all tiers."""

    l1: L1Stats
    l2: L2Stats
    file: FileStats
    moves: MoveStats
    prefetch: PrefetchStats

    def as_dict(self) -> dict[str, dict[str, int]]:
        """Return the numbers as plain dictionaries, one a tier."""
        return asdict(self)


def summed(stats: Sequence[TierStats]) -> TierStats:
    """Return the sums of managers that share a model; `peak_bytes` is of peaks that need not have been at once."""
    return TierStats(
        **{field.name: _summed([getattr(each, field.name) for each in stats]) for field in fields(TierStats)}
    )


def _summed(parts: Sequence[T]) -> T:
    """Return the sum, field by field, of counts of one kind."""
    kind = type(parts[0])
    return kind(**{name: sum(getattr(part, name) for part in parts) for name in kind.__dataclass_fields__})  # type: ignore[attr-defined]
