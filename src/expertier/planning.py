"""A plan for a model on a machine: its ledgers, slots and predicted speeds, as one document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from expertier.errors import BudgetError
from expertier.planner.budget.allocate import LayerPlan, floor_bytes, full_bytes, plan_layers
from expertier.planner.budget.allocate_pair import plan_pair
from expertier.planner.budget.context_memory import ContextShape
from expertier.planner.budget.demand import LayerDemand
from expertier.planner.budget.geometry import ModelGeometry
from expertier.planner.budget.layer_split import units_by_room
from expertier.planner.budget.ledger import DeviceLedger, DeviceNeeds, plan_device
from expertier.planner.budget.ledger_ram import RamConsumer, RamLedger, plan_ram
from expertier.planner.predict.hit_rates import HitRates
from expertier.planner.predict.rates import MachineRates
from expertier.planner.predict.speed import Prediction, Workload, predict
from expertier.tiers.config.budget import (
    HEADROOM_BYTES,
    Budgets,
    all_copies_bytes,
    resolve,
    too_small_to_help,
)
from expertier.tiers.config.config import TierConfig
from expertier.tiers.engine.prefill_stream import prefill_stream_bytes
from expertier.tiers.model.block_weights import read_block_weights
from expertier.tiers.model.device_needs import device_needs
from expertier.tiers.model.needs import ModelNeeds, room_for_blocks
from expertier.tiers.model.slot_layout import SlotLayout
from expertier.tiers.model.table import ExpertTable
from expertier.units import GIB, MIB

F64 = npt.NDArray[np.float64]

ENGINE_RAM_BYTES = 400 * MIB
"""RAM of the process beside weights and buffers: Python, its libraries and the engine's."""

N_BOUNCE_BLOCKS = 2
_POINTS = 24


@dataclass(frozen=True, slots=True)
class Machine:
    """What there is: `vram_bytes` of each device that may be used, none where the host computes; and RAM."""

    ram_bytes: int
    vram_bytes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a plan is made from."""

    table: ExpertTable
    geometry: ModelGeometry
    shape: ContextShape
    machine: Machine
    config: TierConfig
    rates: MachineRates
    hits: HitRates
    uses: F64 | None = None
    demands: Sequence[LayerDemand] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Part:
    """What lies on one device: layers with experts, and what is needed beside them; `share` of all layers."""

    demands: list[LayerDemand]
    layers: list[int]
    needs: DeviceNeeds
    share: float


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan. Where several devices share the layers, there is a ledger for each; `slots` are of all layers."""

    devices: tuple[DeviceLedger, ...]
    ram: RamLedger
    narrow: LayerPlan
    wide: LayerPlan
    prediction: Prediction
    cached_share: float
    savings: dict[str, float]
    notes: tuple[str, ...] = ()


def make_plan(inputs: Inputs) -> Planned:
    """Plan. Raises `BudgetError` where the machine has less than one slot a layer, and says what works."""
    parts = _split(inputs)
    if not parts:
        return _on_host(inputs)
    ledgers: list[DeviceLedger] = []
    narrow_slots: list[int] = []
    wide_slots: list[int] = []
    for part in parts:
        ledger = plan_device(
            part.needs, part.demands, cap_bytes=_part(inputs.config.cap_bytes, part.share),
            asked_bytes=_part(inputs.config.expert_cache_bytes, part.share),
        )  # fmt: skip
        ledgers.append(ledger)
        uses = None if inputs.uses is None else inputs.uses[part.layers]
        pair = plan_pair(part.demands, ledger.arena_narrow_bytes, ledger.arena_bytes, uses)
        narrow_slots += pair.narrow.slots
        wide_slots += pair.wide.slots
    ram = _ram(inputs, inputs.geometry.host_weight_bytes, 0)
    return _finish(inputs, tuple(ledgers), ram, tuple(narrow_slots), tuple(wide_slots))


def _on_host(inputs: Inputs) -> Planned:
    """Plan where the host computes: slots lie in RAM, as `tiers/config/budget.py` sizes them."""
    engine = inputs.geometry.host_weight_bytes + inputs.geometry.device_weight_bytes + _context_bytes(inputs)
    budgets = resolve(
        inputs.config, inputs.table, max(inputs.machine.ram_bytes - engine - ENGINE_RAM_BYTES, 0)
    )
    ram = _ram(inputs, engine, budgets.expert_cache_bytes)
    plan = plan_layers(inputs.demands, budget_bytes=budgets.expert_cache_bytes, profile=inputs.uses)
    return _finish(inputs, (), ram, plan.slots, plan.slots)


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


def _split(inputs: Inputs) -> list[_Part]:
    """Share the blocks out over the devices, as the tiers on them would be."""
    cards = inputs.machine.vram_bytes
    n_layers = len(inputs.demands)
    if not cards:
        return []
    stream_bytes = 0 if inputs.config.stream_tokens == 0 else prefill_stream_bytes(inputs.table)
    if len(cards) == 1:
        needs = device_needs(
            inputs.geometry, inputs.shape, free_bytes=cards[0], prefill_stream_bytes=stream_bytes
        )
        needs = _kept(inputs, needs)
        return [_Part(list(inputs.demands), list(range(n_layers)), needs, 1.0)]
    model = ModelNeeds(inputs.table, inputs.geometry, read_block_weights(inputs.table.path), inputs.shape)
    rooms = [
        room_for_blocks(_kept(inputs, model.whole(vram, prefill_stream_bytes=stream_bytes))) for vram in cards
    ]
    ends = list(accumulate(units_by_room(rooms, model.blocks(), model.output_bytes)))
    parts = []
    for begin, end, vram in zip([0, *ends], ends, cards, strict=False):
        layers = [n for n, layer in enumerate(inputs.table.layers) if begin <= layer.block < end]
        demands = [_renumbered(inputs.demands[layer], place) for place, layer in enumerate(layers)]
        needs = _kept(inputs, model.part(range(begin, end), vram, prefill_stream_bytes=stream_bytes))
        parts.append(_Part(demands, layers, needs, len(layers) / n_layers))
    return parts


def _kept(inputs: Inputs, needs: DeviceNeeds) -> DeviceNeeds:
    """Return needs with what is kept free of a device whatever lies there."""
    headroom, reserve = inputs.config.headroom_bytes, inputs.config.reserve_bytes
    return replace(
        needs,
        headroom=HEADROOM_BYTES if headroom == "auto" else headroom,
        reserve=0 if reserve == "auto" else reserve,
    )


def _renumbered(demand: LayerDemand, layer: int) -> LayerDemand:
    return LayerDemand(
        layer=layer, n_experts=demand.n_experts, top_k=demand.top_k, slot_bytes=demand.slot_bytes,
        fixed_bytes=demand.fixed_bytes, weight=demand.weight,
    )  # fmt: skip


def _part(n_bytes: int | str, share: float) -> int | None:
    return None if isinstance(n_bytes, str) else int(n_bytes * share)


def _ram(inputs: Inputs, engine_bytes: int, arena_bytes: int) -> RamLedger:
    copies = all_copies_bytes(inputs.table)
    asked = inputs.config.host_pool_bytes
    if asked != "auto":
        wanted = asked
    elif inputs.machine.vram_bytes:
        wanted = int(inputs.config.host_pool_percent / 100 * copies)
    else:
        wanted = 0
    largest = max(layout.block_bytes for layout in _layouts(inputs))
    return plan_ram(
        available_bytes=inputs.machine.ram_bytes,
        engine_bytes=engine_bytes + ENGINE_RAM_BYTES,
        bounce_bytes=N_BOUNCE_BLOCKS * largest,
        copies_bytes=copies,
        wanted_bytes=wanted,
        asked=asked != "auto",
        arena_bytes=arena_bytes,
    )


def _layouts(inputs: Inputs) -> Sequence[SlotLayout]:
    return inputs.table.slot_layouts


def _context_bytes(inputs: Inputs) -> int:
    needs = device_needs(inputs.geometry, inputs.shape, free_bytes=0)
    return needs.kv + max(needs.compute_wide, needs.compute_narrow)


def _cached_share(inputs: Inputs, ram: RamLedger, arena_bytes: int) -> float:
    """Return what of the experts that neither slots nor L2 hold the page cache can keep."""
    held = max(arena_bytes if not inputs.machine.vram_bytes else 0, ram.host_pool_bytes)
    rest = max(inputs.table.expert_bytes_total - held, 1)
    return min((ram.entries[RamConsumer.PAGE_CACHE] + ram.unused_bytes) / rest, 1.0)


def _work(inputs: Inputs, slots: Sequence[int], pool_bytes: int, cached_share: float) -> Workload:
    return Workload(inputs.geometry, inputs.demands, slots, inputs.shape, pool_bytes, cached_share)


def _layer_plan(inputs: Inputs, slots: tuple[int, ...]) -> LayerPlan:
    used = sum(demand.bytes_for(n) for demand, n in zip(inputs.demands, slots, strict=True))
    return LayerPlan(slots, used, used)


def _savings(inputs: Inputs, plan: LayerPlan) -> dict[str, float]:
    """Return the bytes a token that more slots would save: one more in every layer, and one more GiB in all."""
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
