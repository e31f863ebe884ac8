"""The tiers of a model on the engine's own devices, with room left for what else the engine puts there."""

from __future__ import annotations

import ctypes as ct
from typing import NamedTuple

from expertier.engine_adapter.engine_device import device_of
from expertier.engine_adapter.place_blocks import DeviceChoice, place_blocks
from expertier.engine_adapter.placement import Placement
from expertier.planner.context_memory import ContextShape
from expertier.tiers.config import TierConfig
from expertier.tiers.manager import TierManager
from expertier.tiers.table import ExpertTable
from expertier.tiers.tier_set import DevicePart, Tiers, TierSet


class EngineTiers(NamedTuple):
    """Tiers, and where the model's blocks are to be placed for them."""

    tiers: Tiers
    placement: Placement


def open_engine_tiers(
    proxy: ct.CDLL, table: ExpertTable, config: TierConfig, shape: ContextShape | None = None
) -> EngineTiers:
    """Make tiers on the engine's devices that `config.engine_device` names, for contexts of `shape` altogether.

    Raises:
        BudgetError: a budget is below what the model needs; it names the device where there are several. DeviceError:
            there is no such device, or it has no memory left. ConfigError: the devices cannot share the model.
    """
    placement = place_blocks(proxy, table, config, shape)
    devices = [device_of(proxy, name) for name in placement.devices]
    if placement.is_split:
        choice = DeviceChoice.of(table, config, shape)
        parts = [
            DevicePart(device, layers, choice.part(device, blocks))
            for device, layers, blocks in zip(
                devices, placement.layers(table), placement.blocks(), strict=True
            )
        ]
        return EngineTiers(TierSet(table, parts, config=config), placement)
    (device,) = devices
    needs = DeviceChoice.of(table, config, shape).whole(device) if device.has_own_memory else None
    return EngineTiers(TierManager(table, device=device, config=config, needs=needs), placement)
