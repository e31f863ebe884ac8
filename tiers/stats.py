"""What the tiers count: bytes beside hits, by cause. Counters only grow; sizes are as of the moment."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class L1Stats:
    """The slots on the device.

    `used_bytes` is what the layers' ranges take of the slab, `bytes_in` the expert bytes of completed fills;
    every request for an expert is a hit or a miss.
    """

    budget_bytes: int
    used_bytes: int
    slots: int
    hits: int
    misses: int
    evictions: int
    bytes_in: int


@dataclass(frozen=True, slots=True)
class L2Stats:
    """The pool of host memory.

    `used_bytes` and `peak_bytes` (the most ever) are what the allocator took for the pool, fills in flight
    included; `bounce_bytes` is the fixed minimum beside it. Hits and misses count the fills of L1 while the
    pool is on.
    """

    budget_bytes: int
    used_bytes: int
    peak_bytes: int
    bounce_bytes: int
    hits: int
    misses: int
    evictions: int
    bytes_in: int


@dataclass(frozen=True, slots=True)
class FileStats:
    """The model's file: `reads` that gave all their bytes, and `failures` that did not."""

    bytes_read: int
    reads: int
    failures: int


@dataclass(frozen=True, slots=True)
class TierStats:
    """A snapshot of all tiers."""

    l1: L1Stats
    l2: L2Stats
    file: FileStats

    def as_dict(self) -> dict[str, dict[str, int]]:
        """Return the numbers as plain dictionaries, one a tier."""
        return asdict(self)
