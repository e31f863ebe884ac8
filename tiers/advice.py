"""What a user should know of budgets that work, but not well."""

from __future__ import annotations

from collections.abc import Sequence

from expertier.tiers.budget import Budgets
from expertier.tiers.table import ExpertTable
from expertier.units import mib, mib_needed


def advise(table: ExpertTable, slots: Sequence[int], budgets: Budgets) -> list[str]:
    """Return advice on budgets and the `slots` a layer that they make; none where there is nothing to say.

    A layer with fewer slots than a token uses experts needs several passes for every token. A host pool that is
    smaller than the slots holds little that they do not: what L1 misses was mostly evicted from the pool, too.
    """
    advice = []
    demands = table.layer_demands()
    fewest = min(range(len(slots)), key=lambda layer: slots[layer] - demands[layer].top_k)
    if slots[fewest] < demands[fewest].top_k:
        needed = sum(demand.bytes_for(demand.top_k) for demand in demands)
        advice.append(
            f"layer {fewest} has {slots[fewest]} expert slots and a token uses {demands[fewest].top_k} experts, so "
            f"that tokens run in several passes; {mib_needed(needed)} MiB of slots (MOE_EXPERT_CACHE_MIB) avoid that"
        )
    if 0 < budgets.host_pool_bytes < budgets.expert_cache_bytes:
        advice.append(
            f"the host pool of {mib(budgets.host_pool_bytes)} is smaller than the {mib(budgets.expert_cache_bytes)} of "
            "expert slots in front of it and will catch almost nothing; make MOE_HOST_POOL_MIB larger, or 0"
        )
    return advice
