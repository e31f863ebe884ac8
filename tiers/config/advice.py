"""Warnings for budgets that work, but badly."""

from __future__ import annotations

from collections.abc import Sequence

from expertier.tiers.config.budget import Budgets, too_small_to_help
from expertier.tiers.model.table import ExpertTable
from expertier.units import mib_needed


def advise(table: ExpertTable, slots: Sequence[int], budgets: Budgets) -> list[str]:
    """Return a warning for each problem of `budgets`; an empty list where there is none.

    `slots` has the number of slots of each layer. There are two problems: a layer has fewer slots than a token uses
    experts, so that every token takes several passes; or the host pool is too small to help (`too_small_to_help`).
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
    pool = too_small_to_help(budgets, table)
    if pool is not None:
        advice.append(pool)
    return advice
