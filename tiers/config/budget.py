"""How many bytes each tier gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from expertier.errors import BudgetError
from expertier.planner.budget.allocate import floor_bytes, full_bytes
from expertier.planner.budget.demand import LayerDemand
from expertier.planner.budget.ledger import DeviceLedger, DeviceNeeds, plan_device
from expertier.planner.budget.ledger_ram import PAGE_CACHE_SHARE
from expertier.tiers.config.config import TierConfig
from expertier.tiers.host_pool.chunk_size import block_size
from expertier.tiers.model.table import ExpertTable
from expertier.units import MIB, mib, mib_needed

RAM_SHARE = 1 - PAGE_CACHE_SHARE
"""Share of the available RAM that `auto` takes at most, for L1 on the host device and for L2 on others.

The engine's dense weights, its key-value cache and the file cache, which is a tier of its own, live in the
rest: a pool that takes all of the RAM makes every miss a read from the disk.
"""

HEADROOM_BYTES = 512 * MIB
"""Device memory that `auto` leaves to the driver, its kernels and the BLAS libraries."""


@dataclass(frozen=True, slots=True)
class Budgets:
    """Bytes for the slots (L1) and for the host pool (L2); `ledger` says where a device's memory goes beside them."""

    expert_cache_bytes: int
    host_pool_bytes: int
    ledger: DeviceLedger | None = field(default=None, compare=False)


def resolve(
    config: TierConfig,
    table: ExpertTable,
    available_bytes: int,
    *,
    device_free_bytes: int | None = None,
    headroom_bytes: int = 0,
    needs: DeviceNeeds | None = None,
) -> Budgets:
    """Return the budgets for a model. `available_bytes` is the RAM that may still be taken.

    Without `device_free_bytes` it runs on the host device, where both tiers live in RAM. There `auto` gives L1
    `host_pool_percent` of all expert bytes, at least the hard floor of one slot a layer and at most
    `RAM_SHARE` of `available_bytes`; it gives L2 nothing, as a copy in RAM of what is in RAM serves no one.

    On a device with memory of its own, `auto` gives L1 all of `device_free_bytes` but `headroom_bytes` (or what the
    config says of that), its reserve and what the other consumers in `needs` take (`device_needs.py`; none without it),
    and L2 `host_pool_percent` of all expert bytes, at most `RAM_SHARE` of `available_bytes`; nothing where L1
    holds all experts.

    L1 never gets more than a slot for every expert, nor more than the config's `cap_bytes`. Raises `BudgetError` below
    the hard floor.
    """
    demands = table.layer_demands()
    floor, full = floor_bytes(demands), full_bytes(demands)
    share = config.host_pool_percent / 100
    cap = full if config.cap_bytes == "auto" else config.cap_bytes
    if cap < floor:
        raise BudgetError(
            f"asked for at most {cap / MIB:.3f} MiB of expert slots, but one slot in each of {len(demands)} layers "
            f"takes {mib(floor)}: set MOE_POOL_CAP_MIB to at least {mib_needed(floor)}"
        )
    ledger = None
    if config.expert_cache_bytes != "auto":
        cache = config.expert_cache_bytes
        if cache < floor:
            raise BudgetError(
                f"asked for {cache / MIB:.3f} MiB of expert slots, but one slot in each of {len(demands)} "
                f"layers takes {mib(floor)}: set MOE_EXPERT_CACHE_MIB to at least {mib_needed(floor)}, or to "
                "`auto`"
            )
    elif device_free_bytes is None:
        cache = _auto_in_ram(demands, share, available_bytes)
    else:
        ledger = plan_device(
            replace(
                needs if needs is not None else DeviceNeeds(0),
                free=device_free_bytes,
                headroom=headroom_bytes if config.headroom_bytes == "auto" else config.headroom_bytes,
                reserve=0 if config.reserve_bytes == "auto" else config.reserve_bytes,
            ),
            demands,
            cap_bytes=cap,
        )
        cache = ledger.arena_bytes
    if config.host_pool_bytes != "auto":
        pool = config.host_pool_bytes
    elif device_free_bytes is None:
        pool = 0
    elif cache >= full:
        pool = 0  # nothing is ever evicted: a copy would be read once, while the slots fill
    else:
        pool = min(int(share * all_copies_bytes(table)), int(available_bytes * RAM_SHARE))
    return Budgets(min(cache, full, cap), pool, ledger)


def experts_by_size(table: ExpertTable) -> dict[int, int]:
    """Return how many experts there are of each size in bytes, as host blocks hold them."""
    counts: dict[int, int] = {}
    for layer, layout in zip(table.layers, table.slot_layouts, strict=True):
        counts[layout.block_bytes] = counts.get(layout.block_bytes, 0) + layer.n_experts
    return counts


def all_copies_bytes(table: ExpertTable) -> int:
    """Return what host blocks for all experts of a model take."""
    return sum(block_size(n_bytes) * count for n_bytes, count in experts_by_size(table).items())


def too_small_to_help(budgets: Budgets, table: ExpertTable) -> str | None:
    """Return what to tell the user of a host pool that is on and catches next to nothing; None of others.

    It has no room for the largest expert, or it is smaller than the slots in front of it: what L1 misses was
    mostly evicted from the pool as well.
    """
    pool, cache = budgets.host_pool_bytes, budgets.expert_cache_bytes
    largest = max(block_size(layout.block_bytes) for layout in table.slot_layouts)
    if pool == 0:
        return None
    if pool < largest:
        return (
            f"the host pool of {mib(pool)} has no room for the largest expert, which takes {mib(largest)}; "
            f"set MOE_HOST_POOL_MIB to more than the {mib(cache)} of expert slots in front of it, or to 0"
        )
    if pool < min(cache, all_copies_bytes(table)):
        return (
            f"the host pool of {mib(pool)} is smaller than the {mib(cache)} of expert slots in front of it and "
            "will catch almost nothing; make MOE_HOST_POOL_MIB larger, or 0"
        )
    return None


def _auto_in_ram(demands: Sequence[LayerDemand], share: float, available_bytes: int) -> int:
    floor = floor_bytes(demands)
    cap = int(available_bytes * RAM_SHARE)
    if cap < floor:
        raise BudgetError(
            f"one expert slot in each of {len(demands)} layers takes {mib(floor)}; `auto` may take half "
            f"of the {mib(available_bytes)} of RAM available: free some, or set MOE_EXPERT_CACHE_MIB to "
            f"at least {mib_needed(floor)}"
        )
    wanted = sum(demand.fixed_bytes + int(share * demand.n_experts * demand.slot_bytes) for demand in demands)
    return min(max(wanted, floor), cap)
