"""The inputs of a plan, and how they are shared out over the devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from expertier.planner.budget.context_memory import ContextShape
from expertier.planner.budget.demand import LayerDemand
from expertier.planner.budget.geometry import ModelGeometry
from expertier.planner.budget.ledger import DeviceNeeds
from expertier.planner.budget.sizing import Experts, Wishes
from expertier.planner.budget.sizing_split import (
    ram_of_share,
    require_a_share_each,
    room_for_blocks,
    split_blocks,
    wishes_by_layers,
)
from expertier.planner.predict.hit_rates import HitRates
from expertier.planner.predict.rates import MachineRates
from expertier.tiers.config.budget import all_copies_bytes, experts_of
from expertier.tiers.config.config import TierConfig
from expertier.tiers.engine.prefill_stream import prefill_stream_bytes
from expertier.tiers.model.block_weights import read_block_weights
from expertier.tiers.model.device_needs import device_needs
from expertier.tiers.model.needs import ModelNeeds
from expertier.tiers.model.table import ExpertTable

F64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine to plan for: RAM, and the free memory of each device that may be used; none where the host computes.

    `computes_in_slab` says whether `MOE_SLAB_COMPUTE=auto` has the engine's compute buffers in the slab, as on CUDA.
    """

    ram_bytes: int
    vram_bytes: tuple[int, ...] = ()
    computes_in_slab: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the devices in messages."""
        return tuple(f"device {number}" for number in range(len(self.vram_bytes)))


@dataclass(frozen=True, slots=True)
class Inputs:
    """The inputs of a plan."""

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
class DeviceShare:
    """One device's share: its layers with experts, its other needs, and its share of the wishes and of the RAM."""

    table: ExpertTable
    experts: Experts
    wishes: Wishes
    needs: DeviceNeeds
    ram_bytes: int
    uses: F64 | None


def split_over_devices(inputs: Inputs) -> list[DeviceShare]:
    """Share the blocks out over the devices, as tiers that are opened on them do; none where the host computes."""
    cards, ram_bytes, names = inputs.machine.vram_bytes, inputs.machine.ram_bytes, inputs.machine.names
    config, table, wishes = inputs.config, inputs.table, inputs.config.wishes()
    if not cards:
        return []
    shares = None if config.tensor_split == "auto" else config.tensor_split
    if shares is not None:
        require_a_share_each(names, shares)
    stream_bytes = prefill_stream_bytes(config, table, has_own_memory=True)
    if len(cards) == 1:
        needs = device_needs(
            inputs.geometry, inputs.shape, free_bytes=cards[0], prefill_stream_bytes=stream_bytes
        )
        return [DeviceShare(table, experts_of(table), wishes, needs, ram_bytes, inputs.uses)]
    weights = read_block_weights(table.path, table.type_sizes)
    model = ModelNeeds(table, inputs.geometry, weights, inputs.shape)
    units = split_blocks(
        model.blocks(),
        model.output_bytes,
        names=names,
        rooms=[
            room_for_blocks(model.needs_on_one_device(vram, prefill_stream_bytes=stream_bytes), wishes)
            for vram in cards
        ],
        shares=shares,
    )
    ends = list(accumulate(units))
    stretches = [range(end - n, end) for end, n in zip(ends, units, strict=True)]
    layers = [[n for n, layer in enumerate(table.layers) if layer.block in stretch] for stretch in stretches]
    tables = [table.of_layers(own) for own in layers]
    copies = [all_copies_bytes(own) for own in tables]
    device_shares = []
    for stretch, vram, own_layers, own, own_wishes in zip(
        stretches,
        cards,
        layers,
        tables,
        wishes_by_layers(wishes, inputs.demands, layers, copies, inputs.uses),
        strict=True,
    ):
        needs = model.needs_of_share(stretch, vram, prefill_stream_bytes=stream_bytes)
        most = max(layer.n_experts for layer in own.layers)
        uses = None if inputs.uses is None else inputs.uses[own_layers, :most]
        ram = ram_of_share(ram_bytes, own.expert_bytes_total / table.expert_bytes_total)
        device_shares.append(DeviceShare(own, experts_of(own), own_wishes, needs, ram, uses))
    return device_shares
