"""The ledger of RAM: the engine, the bounce blocks, what the page cache is left, and so the host pool."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from expertier.errors import BudgetError
from expertier.planner.budget.limited_by import LimitedBy
from expertier.units import mib, mib_needed

PAGE_CACHE_SHARE = 0.5
"""Share of the available RAM that is left to everyone but the host pool, the page cache above all.

The page cache is a tier: a pool that takes all RAM makes each of its misses a read from the disk.
"""


class RamConsumer(StrEnum):
    """Who takes RAM."""

    ENGINE = "engine"
    """The weights that stay in RAM, the engine's own memory, and where there is no device all that a device holds."""

    BOUNCE = "bounce"
    PAGE_CACHE = "page cache"
    ARENA = "arena"
    """Slots for experts, where the device is the host."""

    HOST_POOL = "host pool"


@dataclass(frozen=True, slots=True)
class RamLedger:
    """Who gets how much of the RAM that may still be taken."""

    total_bytes: int
    entries: Mapping[RamConsumer, int]
    limited_by: LimitedBy

    @property
    def host_pool_bytes(self) -> int:
        """Bytes of copies in host memory."""
        return self.entries[RamConsumer.HOST_POOL]

    @property
    def unused_bytes(self) -> int:
        """What nobody takes; the page cache has it too."""
        return self.total_bytes - sum(self.entries.values())

    def check_valid(self) -> None:
        """Assert that every byte stands in one entry and nothing is shared out that is not there."""
        assert set(self.entries) == set(RamConsumer), self.entries
        assert min(self.entries.values()) >= 0, self.entries
        assert self.unused_bytes >= 0, "more is shared out than there is"

    def as_dict(self) -> dict[str, Any]:
        """Return all of it by name, for `--json`."""
        return {
            "total_bytes": self.total_bytes,
            "entries": {str(consumer): n_bytes for consumer, n_bytes in self.entries.items()},
            "unused_bytes": self.unused_bytes,
            "limited_by": str(self.limited_by),
        }


def plan_ram(
    *,
    available_bytes: int,
    engine_bytes: int,
    bounce_bytes: int,
    copies_bytes: int,
    wanted_bytes: int,
    asked: bool = False,
    arena_bytes: int = 0,
) -> RamLedger:
    """Share RAM out: the engine, the bounce blocks and the arena get what they need, then the host pool.

    The pool gets `wanted_bytes`, at most `copies_bytes` (a copy of every expert), and where nobody `asked` for that
    very size at most what leaves `PAGE_CACHE_SHARE` of `available_bytes` to all others. Raises `BudgetError` where
    engine, bounce blocks and arena do not fit, or a pool that was asked for.
    """
    fixed = engine_bytes + bounce_bytes + arena_bytes
    kept = max(int(available_bytes * PAGE_CACHE_SHARE), fixed)
    room = available_bytes - (fixed if asked else kept)
    needed = fixed + (wanted_bytes if asked else 0)
    if needed > available_bytes:
        pool = f", the host pool {mib(wanted_bytes)}" if asked else ""
        raise BudgetError(
            f"the engine needs {mib(engine_bytes)} of RAM, bounce blocks {mib(bounce_bytes)}, expert slots "
            f"{mib(arena_bytes)}{pool}; {mib(available_bytes)} are available: give at least {mib_needed(needed)} MiB, "
            "or lower the context length or the pool"
        )
    bounds = {LimitedBy.SLOTS: copies_bytes, LimitedBy.POOL: wanted_bytes, LimitedBy.RAM: max(room, 0)}
    limited_by = min(bounds, key=lambda limit: bounds[limit])
    pool_bytes = bounds[limited_by]
    ledger = RamLedger(
        available_bytes,
        {
            RamConsumer.ENGINE: engine_bytes,
            RamConsumer.BOUNCE: bounce_bytes,
            RamConsumer.ARENA: arena_bytes,
            RamConsumer.HOST_POOL: pool_bytes,
            RamConsumer.PAGE_CACHE: available_bytes - fixed - pool_bytes,
        },
        limited_by,
    )
    ledger.check_valid()
    return ledger
