"""Chooses the devices of a model, and how many of its blocks lie on each (docs/decisions/0014)."""

from __future__ import annotations

import ctypes as ct
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from expertier.engine_adapter.placement.device_traits import family_of
from expertier.engine_adapter.placement.engine_device import device_names, device_of, has_own_memory
from expertier.engine_adapter.placement.placement import Placement
from expertier.errors import ConfigError
from expertier.hip.device import Device
from expertier.planner.budget.context_memory import ContextShape
from expertier.planner.budget.layer_split import BlockNeeds
from expertier.planner.budget.ledger import DeviceNeeds
from expertier.planner.budget.sizing_split import (
    devices_with_room,
    fits_on_one,
    room_for_blocks,
    smallest_block_bytes,
    split_blocks,
)
from expertier.tiers.config.config import TierConfig
from expertier.tiers.engine.prefill_stream import prefill_stream_bytes
from expertier.tiers.model.needs import ModelNeeds
from expertier.tiers.model.table import ExpertTable
from expertier.units import mib

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """A model and the user's wishes for it, to compare with what devices have room for."""

    model: ModelNeeds
    config: TierConfig

    @classmethod
    def of(cls, table: ExpertTable, config: TierConfig, shape: ContextShape | None) -> DeviceChoice:
        """Read the model's headers; without a `shape`, llama.cpp's default parameters decide the context's shape."""
        shape = shape if shape is not None else ContextShape(full_windows=True)
        return cls(ModelNeeds.of(table, shape), config)

    def needs_on_one_device(self, device: Device) -> DeviceNeeds:
        """Return what the full model takes of one device, beside its experts."""
        return self.model.needs_on_one_device(
            device.free_bytes(), prefill_stream_bytes=self._prefill_stream_bytes(device)
        )

    def needs_of_share(self, device: Device, units: range) -> DeviceNeeds:
        """Return what some of the units of the model take of a device, beside their experts."""
        return self.model.needs_of_share(
            units, device.free_bytes(), prefill_stream_bytes=self._prefill_stream_bytes(device)
        )

    def room(self, device: Device) -> int:
        """Return the bytes that a device has for blocks and their experts, for any choice of blocks."""
        return room_for_blocks(self.needs_on_one_device(device), self.config.wishes())

    def fits_on_one(self, device: Device) -> bool:
        """Whether one device has room for all of the model: every expert that may have a slot has one."""
        return fits_on_one(
            self.needs_on_one_device(device), self.model.table.layer_demands(), self.config.wishes()
        )

    def _prefill_stream_bytes(self, device: Device) -> int:
        return prefill_stream_bytes(self.config, self.model.table, has_own_memory=device.has_own_memory)


def place_blocks(
    proxy: ct.CDLL, table: ExpertTable, config: TierConfig, shape: ContextShape | None = None
) -> Placement:
    """Return where the model's blocks are to lie: on the devices that `config.engine_device` names.

    With `auto` it is the engine's first GPU where all experts fit there beside the other weights, otherwise all GPUs of
    its kind that have room for some layers; without a GPU it is the CPU.

    Raises:
        DeviceError: there is no such device. ConfigError: a device would have no layer with experts, or a share was
            given for more or fewer devices.
    """
    names = candidates(proxy, config.engine_device)
    if config.tensor_split == "auto" and len(names) == 1:
        return Placement.on_one(names[0])
    choice = DeviceChoice.of(table, config, shape)
    model = choice.model
    devices = {name: device_of(proxy, name) for name in names}
    blocks = model.blocks()
    if config.tensor_split != "auto":
        units = split_blocks(blocks, model.output_bytes, names=names, rooms=(), shares=config.tensor_split)
        return Placement(tuple(names), units) if len(names) > 1 else Placement.on_one(names[0])
    if config.engine_device == "auto" and choice.fits_on_one(devices[names[0]]):
        return Placement.on_one(names[0])  # to ask another GPU for its room would take some of its memory
    rooms = [choice.room(devices[name]) for name in names]
    if config.engine_device == "auto":
        names, rooms = _with_room(blocks, names, rooms)
        if len(names) == 1:
            return Placement.on_one(names[0])
    return Placement(tuple(names), split_blocks(blocks, model.output_bytes, names=names, rooms=rooms))


def candidates(proxy: ct.CDLL, wanted: str) -> list[str]:
    """Return the devices that `wanted` names; for `auto` all GPUs of the first GPU's kind, or the CPU."""
    if wanted != "auto":
        names = wanted.split(",")
        for name in names:
            if not has_own_memory(proxy, name) and len(names) > 1:
                raise ConfigError(
                    f"MOE_DEVICE={wanted} names {name}, which has no memory of its own: layers are split over GPUs; "
                    "leave it out"
                )
        return names
    names = device_names(proxy)
    if not has_own_memory(proxy, names[0]):
        return names[:1]
    return [name for name in names if family_of(name) == family_of(names[0]) and has_own_memory(proxy, name)]


def _with_room(
    blocks: Sequence[BlockNeeds], names: Sequence[str], rooms: Sequence[int]
) -> tuple[list[str], list[int]]:
    """Return the devices with room for one block with a slot, no more of them than there are blocks with experts.

    A warning names each device that is left out for want of room.
    """
    roomy = devices_with_room(rooms, blocks)
    for number, (name, room) in enumerate(zip(names, rooms, strict=True)):
        if number not in roomy:
            _log.warning(
                "%s is left out: it has %s left for layers, and the smallest layer takes %s",
                name,
                mib(max(room, 0)),
                mib(smallest_block_bytes(blocks)),
            )
    chosen = roomy[: sum(block.demand is not None for block in blocks)]
    return [names[number] for number in chosen], [rooms[number] for number in chosen]
