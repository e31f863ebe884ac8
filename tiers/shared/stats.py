"""What the tiers count: hits and bytes, by cause. Counters only grow; sizes are those of the moment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class L1Stats:
    """The slots on the device.

    `used_bytes` is what the layers' ranges take of the slab, and `compute_bytes` what is reserved for computing.
    `rounding_bytes` is the rest: it is too small for a slot, or the present plan does not use it. `memory_bytes` is the
    memory under the slab, which may come in chunks. `bytes_in` counts the expert bytes of completed fills. Every
    request for an expert is a hit or a miss.
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

    `used_bytes` is what the allocator has given to the pool, with blocks of unfinished fills; `peak_bytes` is its
    highest value so far. `bounce_bytes` are those of the bounce blocks, which are not part of `used_bytes`.
    `rounding_bytes` is the part of `used_bytes` that no expert can use, because block sizes and the allocator round up.

    Hits and misses count L1's fills while the pool is on. `ahead_fills` experts, of `ahead_bytes` together, were read
    into free room ahead of demand (`pool_filling.py`); `bytes_in` counts them, too. `refusals` are allocations that
    failed. `given_back_bytes` were freed for other pools, for a smaller budget, or because the machine ran short of
    memory.
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
    """The model's files: `reads` that gave all their bytes, and `failures` that did not."""

    bytes_read: int
    reads: int
    failures: int


@dataclass(frozen=True, slots=True)
class MoveStats:
    """Moves of the boundary or of quotas: their number, the bytes copied within the device, and the experts dropped."""

    moves: int = 0
    moved_bytes: int = 0
    dropped: int = 0

    def plus(self, *, moves: int, moved_bytes: int, dropped: int) -> MoveStats:
        """Return these numbers with the given ones added."""
        return MoveStats(self.moves + moves, self.moved_bytes + moved_bytes, self.dropped + dropped)


@dataclass(frozen=True, slots=True)
class PrefetchStats:
    """Prefetches: experts that were fetched ahead of demand.

    `asked` counts the experts to prefetch that were not present already. Of these, `done` arrived, `failed` could not
    be read, and `dropped` were cancelled, found no room, do not exist, or were fetched by demand first. Of the bytes
    that arrived in L1, `useful_bytes` were used afterwards and `wasted_bytes` were evicted unused.
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
        """Return the numbers as plain dictionaries: one for each field, with its numbers by name."""
        return asdict(self)


def summed(stats: Sequence[TierStats]) -> TierStats:
    """Return the sums over managers that share a model.

    `peak_bytes` is the sum of the managers' peaks, which need not have occurred at the same time.
    """
    return TierStats(
        **{field.name: _summed([getattr(each, field.name) for each in stats]) for field in fields(TierStats)}
    )


def _summed(parts: Sequence[T]) -> T:
    """Return the sum, field by field, of stats of one class."""
    kind = type(parts[0])
    return kind(**{name: sum(getattr(part, name) for part in parts) for name in kind.__dataclass_fields__})  # type: ignore[attr-defined]
