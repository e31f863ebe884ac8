"""Chooses the devices of a model, and how many of its blocks lie on each (docs/decisions/0014)."""

from __future__ import annotations

import ctypes as ct
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from expertier.engine_adapter.placement.engine_device import device_names, device_of, has_own_memory
from expertier.engine_adapter.placement.placement import Placement
from expertier.errors import ConfigError
from expertier.hip.device import Device
from expertier.planner.budget.allocate import full_bytes
from expertier.planner.budget.context_memory import ContextShape
from expertier.planner.budget.layer_split import units_by_room, units_of_shares
from expertier.planner.budget.ledger import DeviceNeeds
from expertier.tiers.config.budget import HEADROOM_BYTES
from expertier.tiers.config.config import TierConfig
from expertier.tiers.engine.prefill_stream import prefill_stream_bytes, resolve_stream_tokens
from expertier.tiers.model.needs import ModelNeeds, room_for_blocks
from expertier.tiers.model.table import ExpertTable
from expertier.units import mib

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """A model and the user's wishes for it, to be held against devices."""

    model: ModelNeeds
    config: TierConfig

    @classmethod
    def of(cls, table: ExpertTable, config: TierConfig, shape: ContextShape | None) -> DeviceChoice:
        """Read the model's headers; without a `shape`, it is that of llama.cpp's default parameters."""
        shape = shape if shape is not None else ContextShape(full_windows=True)
        return cls(ModelNeeds.of(table, shape), config)

    def whole(self, device: Device) -> DeviceNeeds:
        """Return what all of the model takes of a device, beside its experts."""
        return self.model.whole(device.free_bytes(), prefill_stream_bytes=self._prefill_stream_bytes(device))

    def part(self, device: Device, units: range) -> DeviceNeeds:
        """Return what some of its units take of a device, beside their experts."""
        return self.model.part(
            units, device.free_bytes(), prefill_stream_bytes=self._prefill_stream_bytes(device)
        )

    def room(self, device: Device) -> int:
        """Return what a device has for blocks and their experts, whichever these are."""
        return room_for_blocks(self._reserved(self.whole(device)))

    def fits_on_one(self, device: Device) -> bool:
        """Whether one device has room for all of it: every expert that may have a slot has one."""
        needs = self._reserved(self.whole(device))
        wanted = full_bytes(self.model.table.layer_demands())
        for bound in (self.config.expert_cache_bytes, self.config.cap_bytes):
            wanted = wanted if bound == "auto" else min(wanted, bound)
        return wanted <= needs.total - sum(needs.reserved().values())

    def _reserved(self, needs: DeviceNeeds) -> DeviceNeeds:
        """Return needs with what `budget.resolve` keeps free as well."""
        headroom, reserve = self.config.headroom_bytes, self.config.reserve_bytes
        return replace(
            needs,
            headroom=HEADROOM_BYTES if headroom == "auto" else headroom,
            reserve=0 if reserve == "auto" else reserve,
        )

    def _prefill_stream_bytes(self, device: Device) -> int:
        return prefill_stream_bytes(self.model.table) if resolve_stream_tokens(self.config, device) else 0


def place_blocks(
    proxy: ct.CDLL, table: ExpertTable, config: TierConfig, shape: ContextShape | None = None
) -> Placement:
    """Return where the model's blocks are to lie: on the devices that `config.engine_device` names.

    `auto` is the engine's first GPU where all experts fit there beside the rest, else all GPUs of its kind that have
    room for some layers; the CPU where there is no GPU.

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
    if config.tensor_split != "auto":
        return _by_shares(model, names, config.tensor_split)
    if config.engine_device == "auto" and choice.fits_on_one(devices[names[0]]):
        return Placement.on_one(names[0])  # before the others are asked, which takes memory of a GPU
    rooms = [choice.room(devices[name]) for name in names]
    if config.engine_device == "auto":
        names, rooms = _with_room(model, names, rooms)
        if len(names) == 1:
            return Placement.on_one(names[0])
    units = units_by_room(rooms, model.blocks(), model.output_bytes)
    return _checked(model, Placement(tuple(names), units))


def candidates(proxy: ct.CDLL, wanted: str) -> list[str]:
    """Return the devices that are named; for `auto` all GPUs of the first one's kind, or the CPU."""
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
    kind = re.sub(r"\d+$", "", names[0])
    if not has_own_memory(proxy, names[0]):
        return names[:1]
    return [name for name in names if re.sub(r"\d+$", "", name) == kind and has_own_memory(proxy, name)]


def _with_room(model: ModelNeeds, names: Sequence[str], rooms: Sequence[int]) -> tuple[list[str], list[int]]:
    """Return the devices without those that have no room for one block with a slot; at least the roomiest stays."""
    blocks = model.blocks()
    smallest = min(
        block.fixed_bytes + block.demand.bytes_for(1) for block in blocks if block.demand is not None
    )
    pairs = list(zip(names, rooms, strict=True))
    kept = [pair for pair in pairs if pair[1] >= smallest] or [max(pairs, key=lambda pair: pair[1])]
    most = sum(block.demand is not None for block in blocks)
    for name, room in pairs:
        if (name, room) not in kept:
            _log.warning(
                "%s is left out: %s of it are left for layers, and the smallest takes %s",
                name,
                mib(max(room, 0)),
                mib(smallest),
            )
    return [name for name, _ in kept[:most]], [room for _, room in kept[:most]]


def _by_shares(model: ModelNeeds, names: Sequence[str], shares: Sequence[float]) -> Placement:
    if len(shares) != len(names):
        raise ConfigError(
            f"MOE_TENSOR_SPLIT has {len(shares)} shares for {len(names)} devices ({', '.join(names)}): give one for "
            "each, or leave it out"
        )
    if len(names) == 1:
        return Placement.on_one(names[0])
    units = units_of_shares(shares, model.n_units)
    return _checked(model, Placement(tuple(names), units))


def _checked(model: ModelNeeds, placement: Placement) -> Placement:
    """Return the placement where every device has a layer with experts that the engine loads."""
    used = [layer for layer in model.table.layers if layer.block < model.weights.n_used]
    for name, blocks in zip(placement.devices, placement.blocks(), strict=True):
        if not any(layer.block in blocks for layer in used):
            raise ConfigError(
                f"{name} would have {len(blocks)} of {sum(placement.units)} layers, and none with experts: leave it "
                "out of MOE_DEVICE, or give it a larger share in MOE_TENSOR_SPLIT"
            )
    return placement
