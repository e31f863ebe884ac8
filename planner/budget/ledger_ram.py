"""The ledger of RAM: what the engine, bounce blocks, slots and the host pool take, and what the page cache is left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from expertier.errors import BudgetError
from expertier.planner.budget.limited_by import LimitedBy
from expertier.units import mib, mib_needed

_SMALLER = {
    True: "or MOE_EXPERT_CACHE_MIB (--expert-cache-mib)",
    False: "or MOE_HOST_POOL_MIB (--host-pool-mib)",
}


class RamConsumer(StrEnum):
    """Who takes RAM."""

    ENGINE = "engine"
    """The weights that stay in RAM and the engine's own memory; on the host also what a device would hold."""

    BOUNCE = "bounce"
    PAGE_CACHE = "page cache"
    ARENA = "arena"
    """Slots for experts on the host device; other devices have them in memory of their own."""

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
        """What no consumer takes, so that the page cache has it too."""
        return self.total_bytes - sum(self.entries.values())

    def check_valid(self) -> None:
        """Assert that every byte stands in one entry, and that the entries are no more than the RAM."""
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
    pool_bytes: int,
    limited_by: LimitedBy,
    asked: bool = False,
    arena_bytes: int = 0,
) -> RamLedger:
    """Share RAM out: the engine, bounce blocks, slots and the host pool get what they need, the page cache the rest.

    `pool_bytes` is the pool's budget, and `limited_by` what keeps it there (`sizing.host_pool`). A pool fills bit by
    bit and gives memory back where RAM runs short, so it gets no more of its budget than the other consumers leave,
    unless the user `asked` for that very size. Raises `BudgetError` where the consumers need more than is available,
    with what each takes.
    """
    fixed = engine_bytes + bounce_bytes + arena_bytes
    if not asked and fixed <= available_bytes < fixed + pool_bytes:
        pool_bytes, limited_by = available_bytes - fixed, LimitedBy.RAM
    needed = fixed + pool_bytes
    if needed > available_bytes:
        raise BudgetError(
            f"the engine needs {mib(engine_bytes)} of RAM, bounce blocks {mib(bounce_bytes)}, expert slots "
            f"{mib(arena_bytes)}, the host pool {mib(pool_bytes)}; {mib(available_bytes)} are available: give at least "
            f"{mib_needed(needed)} MiB, or lower the context length {_SMALLER[arena_bytes > pool_bytes]}"
        )
    ledger = RamLedger(
        available_bytes,
        {
            RamConsumer.ENGINE: engine_bytes,
            RamConsumer.BOUNCE: bounce_bytes,
            RamConsumer.ARENA: arena_bytes,
            RamConsumer.HOST_POOL: pool_bytes,
            RamConsumer.PAGE_CACHE: available_bytes - needed,
        },
        limited_by,
    )
    ledger.check_valid()
    return ledger
