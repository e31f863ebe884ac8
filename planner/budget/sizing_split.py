"""How a model, and what a user wishes for it, are shared out over several devices.

    layer split    needs of each device ─► rooms ─► split_blocks ─► stretches of blocks ─► wishes_by_layers
    tensor split   the engine cuts every expert ──────────────────► shards of experts ───► wishes_by_shards

Pure functions of numbers, for `expertier plan` and for tiers that are opened. `sizing.py` then sizes each device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from expertier.errors import BudgetError, ConfigError
from expertier.planner.budget.allocate import full_bytes, plan_layers
from expertier.planner.budget.demand import LayerDemand
from expertier.planner.budget.layer_split import BlockNeeds, units_by_room, units_of_shares
from expertier.planner.budget.ledger import DeviceNeeds
from expertier.planner.budget.sizing import Wishes, require_arena, require_cap, with_kept_free
from expertier.units import mib, mib_needed

Profile = npt.NDArray[np.generic]
"""The uses of every expert, [layers, most experts]."""


def room_for_blocks(whole: DeviceNeeds, wishes: Wishes) -> int:
    """Return the bytes that a device has for blocks, their experts and the output.

    `whole` is what all of the model would take of the device. Its weights and its cache lie in blocks; the rest is
    taken whichever blocks lie there.
    """
    kept = with_kept_free(whole, wishes)
    return kept.total - sum(kept.reserved().values()) + kept.weights + kept.kv


def fits_on_one(whole: DeviceNeeds, demands: Sequence[LayerDemand], wishes: Wishes) -> bool:
    """Whether one device has room for all of a model: every expert that may have a slot has one."""
    kept = with_kept_free(whole, wishes)
    bounds = [bound for bound in (wishes.arena_bytes, wishes.cap_bytes) if bound is not None]
    return min([full_bytes(demands), *bounds]) <= kept.total - sum(kept.reserved().values())


def smallest_block_bytes(blocks: Sequence[BlockNeeds]) -> int:
    """Return what the smallest block with experts takes of a device with one slot."""
    return min(block.fixed_bytes + block.demand.bytes_for(1) for block in blocks if block.demand is not None)


def devices_with_room(rooms: Sequence[int], blocks: Sequence[BlockNeeds]) -> list[int]:
    """Return the numbers of the devices that have room for one block with a slot; at least the roomiest is kept."""
    smallest = smallest_block_bytes(blocks)
    kept = [number for number, room in enumerate(rooms) if room >= smallest]
    return kept or [max(range(len(rooms)), key=lambda number: rooms[number])]


def split_blocks(
    blocks: Sequence[BlockNeeds],
    output_bytes: int,
    *,
    names: Sequence[str],
    rooms: Sequence[int],
    shares: Sequence[float] | None = None,
) -> tuple[int, ...]:
    """Return how many units of llama.cpp's layer split each device gets: blocks in order, and the output last.

    They follow the `rooms` of the devices, unless the user gave `shares`. Raises `ConfigError` where a device would
    have no block with experts, or where there are more shares than devices or fewer.
    """
    if shares is None:
        units = units_by_room(rooms, blocks, output_bytes)
    else:
        require_a_share_each(names, shares)
        units = units_of_shares(shares, len(blocks) + 1)
    begin = 0
    for name, n_units in zip(names, units, strict=True):
        if not any(block.demand is not None for block in blocks[begin : begin + n_units]):
            raise ConfigError(
                f"{name} would have {n_units} of {sum(units)} layers, and none with experts: leave it out of "
                "MOE_DEVICE, or give it a larger share in MOE_TENSOR_SPLIT"
            )
        begin += n_units
    return units


def require_a_share_each(names: Sequence[str], shares: Sequence[float]) -> None:
    """Raise `ConfigError` where the user gave more shares than there are devices, or fewer."""
    if len(shares) != len(names):
        raise ConfigError(
            f"MOE_TENSOR_SPLIT has {len(shares)} shares for {len(names)} devices ({', '.join(names)}): give one for "
            "each, or leave it out"
        )


def ram_of_share(available_bytes: int, share: float) -> int:
    """Return the part of the available RAM that a device counts with which holds that `share` of all expert bytes."""
    return int(available_bytes * share)


def wishes_by_layers(
    wishes: Wishes,
    demands: Sequence[LayerDemand],
    layers: Sequence[Sequence[int]],
    copies: Sequence[int],
    profile: Profile | None = None,
) -> list[Wishes]:
    """Return the wishes for each device, which has `layers[device]` and needs `copies[device]` bytes for all copies.

    What the user set for the whole model is shared out: slots as one plan over all layers has them, the host pool in
    proportion to the copies. `auto` stays `auto`. Raises `BudgetError` below one slot a layer.
    """
    arenas: Sequence[int | None] = [None] * len(layers)
    caps: Sequence[int | None] = [None] * len(layers)
    require_cap(demands, wishes.cap_bytes)
    if wishes.arena_bytes is not None:
        require_arena(demands, wishes.arena_bytes)
        arenas = _slots_by_layers(demands, wishes.arena_bytes, layers, profile)
    if wishes.cap_bytes is not None:
        caps = _slots_by_layers(demands, wishes.cap_bytes, layers, profile)
    return _shared_out(wishes, arenas, caps, copies)


def wishes_by_shards(
    wishes: Wishes,
    demands: Sequence[Sequence[LayerDemand]],
    copies: Sequence[int],
    profile: Profile | None = None,
) -> list[Wishes]:
    """Return the wishes for each device, which has shards of all layers: `demands[device]` are those of its shards.

    What the user set for the whole model is shared out so that every device has the same slots, and the host pool in
    proportion to the copies. `auto` stays `auto`. Raises `BudgetError` below one slot a layer.
    """
    arenas = _slots_by_shards(demands, wishes.arena_bytes, "MOE_EXPERT_CACHE_MIB", profile)
    caps = _slots_by_shards(demands, wishes.cap_bytes, "MOE_POOL_CAP_MIB", profile)
    return _shared_out(wishes, arenas, caps, copies)


def _shared_out(
    wishes: Wishes, arenas: Sequence[int | None], caps: Sequence[int | None], copies: Sequence[int]
) -> list[Wishes]:
    pool = wishes.pool_bytes
    pools = [None if pool is None else pool * each // sum(copies) for each in copies]
    return [
        replace(wishes, arena_bytes=arena, cap_bytes=cap, pool_bytes=each)
        for arena, cap, each in zip(arenas, caps, pools, strict=True)
    ]


def _slots_by_layers(
    demands: Sequence[LayerDemand], n_bytes: int, layers: Sequence[Sequence[int]], profile: Profile | None
) -> list[int]:
    """Return what each device takes of a budget for slots: its layers' slots in one plan for all layers."""
    if n_bytes >= full_bytes(demands):
        slots: Sequence[int] = [demand.n_experts for demand in demands]
    else:
        slots = plan_layers(demands, budget_bytes=n_bytes, profile=profile).slots
    return [sum(demands[layer].bytes_for(slots[layer]) for layer in part) for part in layers]


def _slots_by_shards(
    demands: Sequence[Sequence[LayerDemand]], n_bytes: int | None, variable: str, profile: Profile | None
) -> list[int | None]:
    """Return what each device takes of a budget for slots: as many everywhere as one plan for whole experts has."""
    if n_bytes is None:
        return [None] * len(demands)
    together = [_sum(of_devices) for of_devices in zip(*demands, strict=True)]
    floor = sum(demand.bytes_for(1) for demand in together)
    if n_bytes < floor:
        raise BudgetError(
            f"asked for {mib(n_bytes)} of expert slots, but one slot in each of {len(together)} layers takes "
            f"{mib(floor)} on {len(demands)} devices together: set {variable} to at least {mib_needed(floor)}, or to "
            "`auto`"
        )
    slots = plan_layers(together, budget_bytes=n_bytes, profile=profile).slots
    return [
        sum(demand.bytes_for(n) for demand, n in zip(of_device, slots, strict=True)) for of_device in demands
    ]


def _sum(demands: Sequence[LayerDemand]) -> LayerDemand:
    """Return the demand of one layer on all devices together."""
    return replace(
        demands[0],
        slot_bytes=sum(demand.slot_bytes for demand in demands),
        fixed_bytes=sum(demand.fixed_bytes for demand in demands),
    )
