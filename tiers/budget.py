"""How many bytes each tier gets."""

from __future__ import annotations

from dataclasses import dataclass

from expertier.errors import BudgetError
from expertier.planner.allocate import floor_bytes, full_bytes
from expertier.tiers.config import TierConfig
from expertier.tiers.table import ExpertTable
from expertier.units import MIB, mib, mib_needed

RAM_SHARE = 0.5
"""Share of the available RAM that `auto` takes at most.

The engine's dense weights, its key-value cache and the file cache, which is a tier of its own, live in the
rest.
"""


@dataclass(frozen=True, slots=True)
class Budgets:
    """Bytes for the slots (L1) and for the host pool (L2)."""

    expert_cache_bytes: int
    host_pool_bytes: int


def resolve(config: TierConfig, table: ExpertTable, available_bytes: int) -> Budgets:
    """Return the budgets for a model on the host device, where both tiers live in RAM.

    `auto` gives L1 `host_pool_percent` of all expert bytes, at least the hard floor of one slot a layer and
    at most `RAM_SHARE` of `available_bytes`; it gives L2 nothing, as a copy in RAM of what is in RAM serves
    no one. L1 never gets more than a slot for every expert. Raises `BudgetError` below the hard floor.
    """
    demands = table.layer_demands()
    floor, full = floor_bytes(demands), full_bytes(demands)
    if config.expert_cache_bytes == "auto":
        share = config.host_pool_percent / 100
        wanted = sum(
            demand.fixed_bytes + int(share * demand.n_experts * demand.slot_bytes) for demand in demands
        )
        cap = int(available_bytes * RAM_SHARE)
        if cap < floor:
            raise BudgetError(
                f"one expert slot in each of {len(demands)} layers takes {mib(floor)}; `auto` may take half "
                f"of the {mib(available_bytes)} of RAM available: free some, or set MOE_EXPERT_CACHE_MIB to "
                f"at least {mib_needed(floor)}"
            )
        cache = min(max(wanted, floor), cap)
    else:
        cache = config.expert_cache_bytes
        if cache < floor:
            raise BudgetError(
                f"asked for {cache / MIB:.3f} MiB of expert slots, but one slot in each of {len(demands)} "
                f"layers takes {mib(floor)}: set MOE_EXPERT_CACHE_MIB to at least {mib_needed(floor)}, or to "
                "`auto`"
            )
    pool = 0 if config.host_pool_bytes == "auto" else config.host_pool_bytes
    return Budgets(min(cache, full), pool)
