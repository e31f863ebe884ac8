"""A plan for a model on a machine: its ledgers, slots and predicted speeds, as one document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from expertier.errors import BudgetError
from expertier.planner.budget.allocate import LayerPlan, floor_bytes, full_bytes, plan_layers
from expertier.planner.budget.ledger import DeviceLedger, DeviceNeeds
from expertier.planner.budget.ledger_ram import RamConsumer, RamLedger, plan_ram
from expertier.planner.budget.limited_by import LimitedBy
from expertier.planner.budget.sizing import (
    PoolSize,
    device_ledger,
    host_pool,
    size_tiers,
    slab_slots,
)
from expertier.planner.predict.hit_rates import HitRates
from expertier.planner.predict.speed import Prediction, Workload, predict
from expertier.planning_devices import DeviceShare, Inputs, split_over_devices
from expertier.tiers.config.budget import Budgets, experts_of, too_small_to_help
from expertier.tiers.host_pool.bounce_blocks import N_BOUNCE_BLOCKS
from expertier.tiers.host_pool.chunk_size import block_size
from expertier.tiers.model.device_needs import device_needs
from expertier.tiers.model.slot_layout import RANGE_ALIGNMENT
from expertier.units import GIB, MIB

F64 = npt.NDArray[np.float64]

ENGINE_RAM_BYTES = 400 * MIB
"""RAM of the process beside weights and buffers: Python, its libraries and the engine's libraries."""

_POINTS = 24


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, with a ledger for each device; `narrow` and `wide` have the slots of all layers."""

    devices: tuple[DeviceLedger, ...]
    ram: RamLedger
    narrow: LayerPlan
    wide: LayerPlan
    prediction: Prediction
    cached_share: float
    savings: dict[str, float]
    notes: tuple[str, ...] = ()


def make_plan(inputs: Inputs) -> Planned:
    """Plan with the sizes that tiers on this machine would have (`planner/budget/sizing.py`).

    Raises `BudgetError` where the machine has no room for one slot in each layer; it names the budget that works.
    """
    shares = split_over_devices(inputs)
    if not shares:
        return _on_host(inputs)
    asked = inputs.config.slab_compute
    in_slab = inputs.machine.computes_in_slab if asked == "auto" else asked
    ledgers: list[DeviceLedger] = []
    pools: list[PoolSize] = []
    narrow_slots: list[int] = []
    wide_slots: list[int] = []
    for share in shares:
        ledger = device_ledger(share.experts, share.wishes, share.needs, computes_in_slab=in_slab)
        ledgers.append(ledger)
        pools.append(
            host_pool(
                share.experts,
                share.wishes,
                available_bytes=share.ram_bytes,
                holds_all=ledger.arena_bytes >= ledger.full_bytes,
                has_own_memory=True,
            )
        )
        planned = slab_slots(
            share.experts.demands,
            arena_bytes=ledger.arena_bytes,
            wide_bytes=share.needs.compute_wide if in_slab else 0,
            narrow_bytes=share.needs.compute_narrow,
            alignment=RANGE_ALIGNMENT,
            profile=share.uses,
        )
        narrow_slots += planned.narrow.slots
        wide_slots += planned.wide.slots
    ram = _ram(inputs, inputs.geometry.host_weight_bytes, 0, shares, pools)
    return _finish(inputs, tuple(ledgers), ram, tuple(narrow_slots), tuple(wide_slots))


def _on_host(inputs: Inputs) -> Planned:
    """Plan where the host computes: slots lie in RAM."""
    engine = inputs.geometry.host_weight_bytes + inputs.geometry.device_weight_bytes + _context_bytes(inputs)
    ram_bytes = inputs.machine.ram_bytes
    experts, wishes = experts_of(inputs.table), inputs.config.wishes()
    sizes = size_tiers(experts, wishes, available_bytes=ram_bytes)
    share = DeviceShare(inputs.table, experts, wishes, DeviceNeeds(0), ram_bytes, inputs.uses)
    ram = _ram(inputs, engine, sizes.arena_bytes, [share], [sizes.pool])
    plan = slab_slots(inputs.demands, arena_bytes=sizes.arena_bytes, profile=inputs.uses)
    return _finish(inputs, (), ram, plan.narrow.slots, plan.wide.slots)


def _finish(
    inputs: Inputs,
    ledgers: tuple[DeviceLedger, ...],
    ram: RamLedger,
    narrow_slots: tuple[int, ...],
    wide_slots: tuple[int, ...],
) -> Planned:
    narrow, wide = _layer_plan(inputs, narrow_slots), _layer_plan(inputs, wide_slots)
    pool = ram.host_pool_bytes
    cached = _cached_share(inputs, ram, narrow.used_bytes)
    prediction = predict(_work(inputs, narrow.slots, pool, cached), inputs.hits, inputs.rates)
    holds_all = narrow.used_bytes >= full_bytes(inputs.demands)
    pool_note = None if holds_all else too_small_to_help(Budgets(narrow.used_bytes, pool), inputs.table)
    notes = (*inputs.geometry.notes, *([pool_note] if pool_note is not None else []))
    return Planned(ledgers, ram, narrow, wide, prediction, cached, _savings(inputs, narrow), notes)


def curve(inputs: Inputs, planned: Planned, optimum: HitRates | None = None) -> list[dict[str, Any]]:
    """Return hit rate and predicted speed over sizes of the arena, from one slot a layer to one for each expert."""
    floor, full = floor_bytes(inputs.demands), full_bytes(inputs.demands)
    others = sum(
        ledger.total_bytes - ledger.unused_bytes - ledger.arena_narrow_bytes for ledger in planned.devices
    )
    sizes = sorted({*np.linspace(floor, full, _POINTS).astype(int).tolist(), planned.narrow.used_bytes})
    points = []
    for size in sizes:
        plan = plan_layers(inputs.demands, budget_bytes=max(size, floor), profile=inputs.uses)
        found = predict(
            _work(inputs, plan.slots, planned.ram.host_pool_bytes, planned.cached_share),
            inputs.hits,
            inputs.rates,
        )
        misses = inputs.hits.misses(plan.slots, planned.ram.host_pool_bytes)
        points.append(
            {
                "arena_bytes": plan.used_bytes,
                "total_bytes": plan.used_bytes + max(others, 0),
                "hit_rate": found.hit_rate,
                "hit_rate_low": 1 - misses.high / misses.lookups,
                "hit_rate_high": 1 - misses.low / misses.lookups,
                "optimum": None if optimum is None else optimum.misses(plan.slots).hit_rate,
                "decode": found.decode.as_dict(),
            }
        )
    return points


def _ram(
    inputs: Inputs,
    engine_bytes: int,
    arena_bytes: int,
    shares: Sequence[DeviceShare],
    pools: Sequence[PoolSize],
) -> RamLedger:
    """Return the ledger of RAM. A device's pool takes its budget, but at most one copy of each expert."""
    largest = [max(block_size(layout.block_bytes) for layout in share.table.slot_layouts) for share in shares]
    limits = {pool.limited_by for pool in pools}
    return plan_ram(
        available_bytes=inputs.machine.ram_bytes,
        engine_bytes=engine_bytes + ENGINE_RAM_BYTES,
        bounce_bytes=N_BOUNCE_BLOCKS * sum(largest),
        pool_bytes=sum(
            min(pool.budget_bytes, share.experts.copies_bytes)
            for pool, share in zip(pools, shares, strict=True)
        ),
        limited_by=next(
            limit for limit in (LimitedBy.RAM, LimitedBy.POOL, LimitedBy.SLOTS) if limit in limits
        ),
        asked=inputs.config.host_pool_bytes != "auto",
        arena_bytes=arena_bytes,
    )


def _context_bytes(inputs: Inputs) -> int:
    needs = device_needs(inputs.geometry, inputs.shape, free_bytes=0)
    return needs.kv + max(needs.compute_wide, needs.compute_narrow)


def _cached_share(inputs: Inputs, ram: RamLedger, arena_bytes: int) -> float:
    """Return the part that the page cache can keep of the experts that are neither in slots nor in L2."""
    held = max(arena_bytes if not inputs.machine.vram_bytes else 0, ram.host_pool_bytes)
    rest = max(inputs.table.expert_bytes_total - held, 1)
    return min((ram.entries[RamConsumer.PAGE_CACHE] + ram.unused_bytes) / rest, 1.0)


def _work(inputs: Inputs, slots: Sequence[int], pool_bytes: int, cached_share: float) -> Workload:
    return Workload(inputs.geometry, inputs.demands, slots, inputs.shape, pool_bytes, cached_share)


def _layer_plan(inputs: Inputs, slots: tuple[int, ...]) -> LayerPlan:
    used = sum(demand.bytes_for(n) for demand, n in zip(inputs.demands, slots, strict=True))
    return LayerPlan(slots, used, used)


def _savings(inputs: Inputs, plan: LayerPlan) -> dict[str, float]:
    """Return how many bytes a token more slots would save: one slot more in every layer, or one GiB more of slots."""
    now = inputs.hits.misses(plan.slots).bytes
    one_more = [min(n + 1, demand.n_experts) for n, demand in zip(plan.slots, inputs.demands, strict=True)]
    try:
        larger = plan_layers(inputs.demands, budget_bytes=plan.used_bytes + GIB, profile=inputs.uses).slots
    except BudgetError:  # pragma: no cover - a larger budget than one that works
        larger = plan.slots
    return {
        "missed_bytes_per_token": now,
        "saved_by_one_more_slot_a_layer": now - inputs.hits.misses(one_more).bytes,
        "saved_by_one_more_gib": now - inputs.hits.misses(larger).bytes,
    }
