"""The tiers of a model whose layers lie on the engine's own devices, with room for what the engine itself allocates."""

from __future__ import annotations

import ctypes as ct
from typing import NamedTuple

from expertier.engine_adapter.binding.slab_compute import computes_in_slab
from expertier.engine_adapter.placement.blocks import DeviceChoice, place_blocks
from expertier.engine_adapter.placement.engine_device import device_of
from expertier.engine_adapter.placement.placement import Placement
from expertier.planner.budget.context_memory import ContextShape
from expertier.planner.budget.ledger import DeviceNeeds
from expertier.tiers.config.config import TierConfig
from expertier.tiers.config.room import require_host_room
from expertier.tiers.layer_division import DeviceShare, LayerDivision
from expertier.tiers.model.table import ExpertTable
from expertier.tiers.tier_set import TierSet


class EngineTiers(NamedTuple):
    """Tiers, and where the model's blocks are to be placed for them."""

    tiers: TierSet
    placement: Placement


def open_layer_tiers(
    proxy: ct.CDLL, table: ExpertTable, config: TierConfig, shape: ContextShape | None = None
) -> EngineTiers:
    """Make tiers on the engine's devices that `config.engine_device` names; `shape` describes all contexts together.

    Raises:
        BudgetError: a budget is below what the model needs; it names the device where there are several. DeviceError:
            there is no such device, or it has no memory left. ConfigError: the devices cannot share the model.
    """
    placement = place_blocks(proxy, table, config, shape)
    devices = [device_of(proxy, name) for name in placement.devices]

    def compute_bytes(name: str, needs: DeviceNeeds) -> int:
        return needs.compute_wide if computes_in_slab(proxy, config.slab_compute, name) else 0

    if placement.is_split:
        choice = DeviceChoice.of(table, config, shape)
        each = zip(placement.devices, devices, placement.layers(table), placement.blocks(), strict=True)
        shares = []
        for name, device, layers, blocks in each:
            needs = choice.needs_of_share(device, blocks)
            shares.append(DeviceShare(device, layers, needs, compute_bytes(name, needs)))
        return EngineTiers(TierSet(LayerDivision(table, shares), config=config), placement)
    (device,) = devices
    if not device.has_own_memory:
        require_host_room(config, table, shape)
        return EngineTiers(TierSet(LayerDivision.on_one(table, device), config=config), placement)
    needs = DeviceChoice.of(table, config, shape).needs_on_one_device(device)
    division = LayerDivision.on_one(table, device, needs, compute_bytes(placement.devices[0], needs))
    return EngineTiers(TierSet(division, config=config), placement)
