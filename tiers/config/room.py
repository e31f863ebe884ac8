"""Whether the RAM holds the budgets that the user asked for, checked before anything is allocated."""

from __future__ import annotations

from expertier.errors import BudgetError
from expertier.planner.budget.allocate import full_bytes
from expertier.planner.budget.context_memory import ContextShape, cache_bytes
from expertier.tiers.config.budget import all_copies_bytes, resolve
from expertier.tiers.config.config import TierConfig
from expertier.tiers.model.geometry import read_geometry
from expertier.tiers.model.table import ExpertTable
from expertier.tiers.shared.host_memory import available_bytes, total_bytes
from expertier.units import mib


def require_host_room(
    config: TierConfig,
    table: ExpertTable,
    shape: ContextShape | None = None,
    *,
    available: int | None = None,
    total: int | None = None,
) -> None:
    """Raise `BudgetError` where slots in RAM and a context of `shape` take more RAM than is available.

    The host pool takes memory only as it fills, and gives it back when memory gets short. It is therefore refused only
    where slots and pool exceed all RAM of the machine. `available` and `total` are bytes of RAM: what this process may
    still allocate, and what the machine has; the default is to ask the system.
    """
    available = available_bytes() if available is None else available
    total = total_bytes() if total is None else total
    budgets = resolve(config, table, available)
    slots = min(budgets.expert_cache_bytes, full_bytes(table.layer_demands()))
    pool = min(budgets.host_pool_bytes, all_copies_bytes(table))
    if config.expert_cache_bytes != "auto" and slots > available:
        raise BudgetError(
            f"asked for {mib(slots)} of expert slots in RAM, of which {mib(available)} are available: set "
            "MOE_EXPERT_CACHE_MIB (--expert-cache-mib) to less, or to `auto`, or free some RAM"
        )
    if slots + pool > total:
        raise BudgetError(
            f"asked for {mib(slots)} of expert slots and {mib(pool)} of host pool, and the machine has {mib(total)} of "
            "RAM in all: set MOE_HOST_POOL_MIB (--host-pool-mib) to less, or to `auto`"
        )
    if shape is None:
        return
    cache = cache_bytes(read_geometry(table.path, table.type_sizes), shape)
    if cache + slots > available:
        raise BudgetError(
            f"a context of {shape.n_ctx} tokens takes {mib(cache)} of RAM for its keys and values, beside {mib(slots)} "
            f"of expert slots; {mib(available)} are available: ask for a shorter context (--ctx), for fewer slots "
            "(--expert-cache-mib), or free some RAM"
        )
