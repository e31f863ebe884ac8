"""Chooses the devices of a model, and how many of its blocks lie on each (docs/decisions/0014)."""

from __future__ import annotations

import ctypes as ct
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from expertier.engine_adapter.engine_device import device_names, device_of, has_own_memory
from expertier.engine_adapter.placement import Placement
from expertier.errors import ConfigError
from expertier.hip.device import Device
from expertier.planner.allocate import full_bytes
from expertier.planner.context_memory import ContextShape, cache_bytes
from expertier.planner.geometry import ModelGeometry
from expertier.planner.layer_split import BlockNeeds, units_by_room, units_of_shares
from expertier.planner.ledger import DeviceNeeds
from expertier.tiers.block_weights import BlockWeights, read_block_weights
from expertier.tiers.budget import HEADROOM_BYTES
from expertier.tiers.config import TierConfig
from expertier.tiers.device_needs import device_needs
from expertier.tiers.model_geometry import read_geometry
from expertier.tiers.staged_batches import resolve_stream_tokens
from expertier.tiers.table import ExpertTable
from expertier.units import mib

N_STAGED_LAYERS = 2
"""Layers that large batches pass through at the same time (ggml_proxy/staging.h)."""

_F32_BYTES = 4

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelNeeds:
    """What a model takes of the devices that share it, for contexts of `shape` altogether."""

    table: ExpertTable
    config: TierConfig
    geometry: ModelGeometry
    weights: BlockWeights
    shape: ContextShape

    @classmethod
    def of(cls, table: ExpertTable, config: TierConfig, shape: ContextShape | None) -> ModelNeeds:
        """Read the model's headers; without a `shape`, that of llama.cpp's default parameters."""
        shape = shape if shape is not None else ContextShape(full_windows=True)
        return cls(table, config, read_geometry(table.path), read_block_weights(table.path), shape)

    def whole(self, device: Device) -> DeviceNeeds:
        """Return what all of the model takes of a device, beside its experts."""
        return device_needs(
            self.geometry, self.shape, free_bytes=device.free_bytes(), staging_bytes=self._staging(device)
        )

    def part(self, device: Device, blocks: range) -> DeviceNeeds:
        """Return what some blocks take of a device, beside their experts; the number after the last is the output."""
        has_output = self.weights.n_blocks in blocks
        weights = sum(self.weights.bytes_by_block[blocks.start : blocks.stop])
        geometry = replace(
            self.geometry,
            blocks=self.geometry.blocks[blocks.start : blocks.stop],
            device_weight_bytes=weights + (self.output_bytes if has_output else 0),
            n_vocab=self.geometry.n_vocab if has_output else 0,
        )
        handed_over = min(self.shape.n_ubatch, self.shape.n_ctx) * geometry.n_embd * geometry.streams
        return device_needs(
            geometry,
            self.shape,
            free_bytes=device.free_bytes(),
            staging_bytes=self._staging(device),
            peer_bytes=handed_over * _F32_BYTES if blocks.start else 0,
        )

    def room(self, device: Device) -> int:
        """Return what a device has for blocks, their experts and the output: what is not taken whatever lies there."""
        needs = self._reserved(self.whole(device))
        return needs.total - sum(needs.reserved().values()) + needs.weights + needs.kv

    def blocks(self) -> list[BlockNeeds]:
        """Return what each block takes of the device that it lies on."""
        demands = self.table.layer_demands()
        by_block = {layer.block: demands[number] for number, layer in enumerate(self.table.layers)}
        found = []
        for block, weights in enumerate(self.weights.bytes_by_block):
            alone = replace(self.geometry, blocks=self.geometry.blocks[block : block + 1])
            found.append(BlockNeeds(weights + cache_bytes(alone, self.shape), by_block.get(block)))
        return found

    @property
    def output_bytes(self) -> int:
        """What lies on the device of the output: weights that belong to no block."""
        return max(self.geometry.device_weight_bytes - sum(self.weights.bytes_by_block), 0)

    def fits_on_one(self, device: Device) -> bool:
        """Whether one device has room for all of it: every expert that may have a slot has one."""
        needs = self._reserved(self.whole(device))
        wanted = full_bytes(self.table.layer_demands())
        for bound in (self.config.expert_cache_bytes, self.config.cap_bytes):
            wanted = wanted if bound == "auto" else min(wanted, bound)
        return wanted <= needs.total - sum(needs.reserved().values())

    def _reserved(self, needs: DeviceNeeds) -> DeviceNeeds:
        """Return needs with what `budget.resolve` keeps free as well."""
        headroom, rail = self.config.headroom_bytes, self.config.rail_bytes
        return replace(
            needs,
            headroom=HEADROOM_BYTES if headroom == "auto" else headroom,
            rail=0 if rail == "auto" else rail,
        )

    def _staging(self, device: Device) -> int:
        if not resolve_stream_tokens(self.config, device):
            return 0
        layers = zip(self.table.layers, self.table.slot_layouts, strict=True)
        return N_STAGED_LAYERS * max(layout.range_bytes(layer.n_experts) for layer, layout in layers)


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
    model = ModelNeeds.of(table, config, shape)
    devices = {name: device_of(proxy, name) for name in names}
    if config.tensor_split != "auto":
        return _by_shares(model, names, config.tensor_split)
    rooms = [model.room(devices[name]) for name in names]
    if config.engine_device == "auto":
        if model.fits_on_one(devices[names[0]]):
            return Placement.on_one(names[0])
        names, rooms = _with_room(model, names, rooms)
        if len(names) == 1:
            return Placement.on_one(names[0])
    return _checked(table, Placement(tuple(names), units_by_room(rooms, model.blocks(), model.output_bytes)))


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
    units = units_of_shares(shares, model.weights.n_blocks + 1)
    return _checked(model.table, Placement(tuple(names), units))


def _checked(table: ExpertTable, placement: Placement) -> Placement:
    """Return the placement where every device has a layer with experts."""
    for name, layers, blocks in zip(
        placement.devices, placement.layers(table), placement.blocks(), strict=True
    ):
        if not layers:
            raise ConfigError(
                f"{name} would have {len(blocks)} of {sum(placement.units)} layers, and none with experts: leave it "
                "out of MOE_DEVICE, or give it a larger share in MOE_TENSOR_SPLIT"
            )
    return placement
