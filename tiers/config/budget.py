"""How many bytes each tier gets."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from expertier.planner.budget.ledger import DeviceLedger, DeviceNeeds
from expertier.planner.budget.sizing import Experts, size_tiers
from expertier.tiers.config.config import TierConfig
from expertier.tiers.host_pool.chunk_size import block_size
from expertier.tiers.model.table import ExpertTable
from expertier.units import mib


@dataclass(frozen=True, slots=True)
class Budgets:
    """Bytes for the slots (L1) and for the host pool (L2).

    `ledger` lists every consumer of a device's memory, the slots among them. It is None on the host device, and where
    the user set the size of L1, so that there was nothing to divide.
    """

    expert_cache_bytes: int
    host_pool_bytes: int
    ledger: DeviceLedger | None = field(default=None, compare=False)


def resolve(
    config: TierConfig,
    table: ExpertTable,
    available_bytes: int,
    *,
    device_free_bytes: int | None = None,
    needs: DeviceNeeds | None = None,
) -> Budgets:
    """Return the budgets for a model, as `planner/budget/sizing.py` computes them.

    `available_bytes` is the RAM that this process may still allocate. Without `device_free_bytes` the model runs on the
    host device, where both tiers lie in RAM. With it, the model runs on a device that has this much free memory of its
    own, and `needs` says what the other consumers of that memory take (`device_needs.py`; by default nothing). Raises
    `BudgetError` where the budget is smaller than one slot for each layer.
    """
    if device_free_bytes is not None:
        needs = replace(needs if needs is not None else DeviceNeeds(0), free=device_free_bytes)
    sizes = size_tiers(
        experts_of(table),
        config.wishes(),
        available_bytes=available_bytes,
        needs=None if device_free_bytes is None else needs,
    )
    return Budgets(sizes.arena_bytes, sizes.pool.budget_bytes, sizes.ledger)


def experts_of(table: ExpertTable) -> Experts:
    """Return what sizing has to know of a model's experts: each layer's demand, and the bytes of a copy of each."""
    return Experts(table.layer_demands(), all_copies_bytes(table))


def experts_by_size(table: ExpertTable) -> dict[int, int]:
    """Return a dictionary from the bytes of an expert in a host block to the number of experts of that size."""
    counts: dict[int, int] = {}
    for layer, layout in zip(table.layers, table.slot_layouts, strict=True):
        counts[layout.block_bytes] = counts.get(layout.block_bytes, 0) + layer.n_experts
    return counts


def all_copies_bytes(table: ExpertTable) -> int:
    """Return the bytes that the host pool takes when it holds a copy of every expert of the model."""
    return sum(block_size(n_bytes) * count for n_bytes, count in experts_by_size(table).items())


def too_small_to_help(budgets: Budgets, table: ExpertTable) -> str | None:
    """Return a warning where a host pool is too small to save reads; None where the pool is off or large enough.

    A pool is too small where the largest expert does not fit, or where the pool is smaller than the slots in front of
    it: an expert that L1 has evicted has then mostly left the pool as well, so a miss in L1 misses in L2, too.
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
