"""Divides layers over devices: an expert belongs to one device, so it is read once and copied once in host memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from expertier.hip.device import Device
from expertier.planner.budget.ledger import DeviceNeeds
from expertier.planner.budget.sizing_split import wishes_by_layers
from expertier.tiers.config.budget import all_copies_bytes
from expertier.tiers.config.config import TierConfig
from expertier.tiers.division import Member
from expertier.tiers.file.byte_source import ByteSource
from expertier.tiers.model.profile import ModelProfile
from expertier.tiers.model.table import ExpertTable


@dataclass(frozen=True, slots=True)
class DeviceShare:
    """A device, the layers whose experts it holds, and what an engine takes of its memory besides (`needs`).

    `compute_bytes`, which `needs` includes, is the size of the engine's compute buffers in the slab.
    """

    device: Device
    layers: tuple[int, ...]
    needs: DeviceNeeds | None = None
    compute_bytes: int = 0


class LayerDivision:
    """A `Division` that puts each layer of a model on one device, on a single device or on several."""

    completes_together = False
    """Each manager fetches its own layers' experts as soon as an engine is bound to it."""

    def __init__(self, table: ExpertTable, shares: Sequence[DeviceShare]) -> None:
        """Divide the layers of `table`. Raises `ValueError` unless each layer is in one share and no share is empty."""
        placed = sorted(layer for share in shares for layer in share.layers)
        if placed != list(range(table.n_layers)) or not all(share.layers for share in shares):
            raise ValueError(
                f"{len(shares)} shares have the layers {placed} of {table.n_layers}: each layer has to be in one "
                "share, and each share needs a layer"
            )
        self.table = table
        self._shares = tuple(shares)
        self.layers = tuple(share.layers for share in shares)

    @classmethod
    def on_one(
        cls, table: ExpertTable, device: Device, needs: DeviceNeeds | None = None, compute_bytes: int = 0
    ) -> LayerDivision:
        """Return a division that puts all layers on one device."""
        return cls(table, [DeviceShare(device, tuple(range(table.n_layers)), needs, compute_bytes)])

    def members(self, config: TierConfig, profile: ModelProfile) -> list[Member]:
        """Return what each manager is made of, with the sizes in `config` divided among the devices.

        The bytes for slots are divided as one plan over all layers gives slots to each layer, and the host pool's bytes
        in proportion to the experts. `auto` is resolved for each device by itself.
        """
        tables = [self.table.of_layers(share.layers) for share in self._shares]
        configs = self._configs(tables, config, profile)
        return [
            Member(
                table,
                share.device,
                own,
                profile.of_layers(share.layers, max(layer.n_experts for layer in table.layers)),
                f"{len(share.layers)} of {self.table.n_layers} layers with experts",
                share.needs,
                share.compute_bytes,
            )
            for table, share, own in zip(tables, self._shares, configs, strict=True)
        ]

    def split_source(self, source: ByteSource) -> None:
        """Return None: every manager reads full experts from `source`."""

    def slots(self, of_managers: Iterable[Sequence[int]]) -> tuple[int, ...]:
        """Return the number of slots of each layer, in the order of the model."""
        slots = [0] * self.table.n_layers
        for layers, of_manager in zip(self.layers, of_managers, strict=True):
            for layer, n_slots in zip(layers, of_manager, strict=True):
                slots[layer] = n_slots
        return tuple(slots)

    def places(self, layer: int) -> tuple[tuple[int, int], ...]:
        """Return (number of the manager, number of the layer in it) for the one manager that has the layer.

        Raises `IndexError` for a layer that the model does not have.
        """
        for number, layers in enumerate(self.layers):
            if layer in layers:
                return ((number, layers.index(layer)),)
        raise IndexError(f"asked for layer {layer}: the model has MoE layers 0 to {self.table.n_layers - 1}")

    def _configs(
        self, tables: Sequence[ExpertTable], config: TierConfig, profile: ModelProfile
    ) -> list[TierConfig]:
        """Return the config of each device. A single device gets the config as it is, with all of its budgets."""
        if len(tables) == 1:
            return [config]
        copies = [all_copies_bytes(table) for table in tables]
        demands = self.table.layer_demands()
        wishes = wishes_by_layers(config.wishes(), demands, self.layers, copies, profile.plan_uses)
        return [config.with_wishes(own) for own in wishes]
