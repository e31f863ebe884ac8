"""Shards of every expert on each device, for a model that an engine splits tensor by tensor.

file ─► SplitSource ─┬─► TierManager on the first device:  its shards of all layers
                     └─► TierManager on the second device: its shards of all layers
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from expertier.hip.device import Device
from expertier.planner.budget.ledger import DeviceNeeds
from expertier.planner.budget.sizing_split import wishes_by_shards
from expertier.tiers.config.budget import all_copies_bytes
from expertier.tiers.config.config import TierConfig
from expertier.tiers.division import Member
from expertier.tiers.file.byte_source import ByteSource
from expertier.tiers.model.profile import ModelProfile
from expertier.tiers.split.split_source import SplitSource
from expertier.tiers.split.split_table import SplitTable


class ShardDivision:
    """Every layer on every device; a `Division`. Each manager counts the uses of its own shards."""

    completes_together = True
    """So that each expert is read once, for all of its shards."""

    def __init__(
        self, split: SplitTable, devices: Sequence[Device], needs: Sequence[DeviceNeeds | None] | None = None
    ) -> None:
        """Have `devices[i]` hold the shards of `split.tables[i]`, beside what an engine takes by `needs[i]`."""
        self.table = split.full_table
        self.layers = (tuple(range(self.table.n_layers)),) * split.n_devices
        self._split = split
        self._devices = tuple(devices)
        self._needs = tuple(needs) if needs is not None else (None,) * split.n_devices

    def members(self, config: TierConfig, profile: ModelProfile) -> list[Member]:
        """Return what each manager is made of: what `config` gives as numbers is shared out.

        With a number for L1 every device has the same slots. The host pool's bytes are shared out in proportion to the
        shards, and `auto` is resolved device by device. No device looks ids up for itself: it would hold another device
        up.
        """
        tables = self._split.tables
        wishes = wishes_by_shards(
            config.wishes(),
            [shards.layer_demands() for shards in tables],
            [all_copies_bytes(shards) for shards in tables],
            profile.plan_uses,
        )
        # Each device would read full experts to fill its own pool with shards, so `auto` is off.
        fill = False if config.fill_pool == "auto" else config.fill_pool
        config = replace(config, decode_gate=False, fill_pool=fill)
        holds = f"shards of all {self.table.n_layers} layers"
        return [
            Member(shards, device, config.with_wishes(own), profile, holds, needs)
            for shards, device, own, needs in zip(tables, self._devices, wishes, self._needs, strict=True)
        ]

    def split_source(self, source: ByteSource) -> SplitSource:
        """Have each expert read once, and its shards handed to the managers."""
        return SplitSource(source, self._split)

    def slots(self, of_managers: Iterable[Sequence[int]]) -> tuple[int, ...]:
        """Return each layer's slots on the device that has the fewest."""
        return tuple(map(min, zip(*of_managers, strict=True)))

    def places(self, layer: int) -> tuple[tuple[int, int], ...]:
        """Return all managers: each holds shards of every layer."""
        if layer not in range(self.table.n_layers):
            raise IndexError(
                f"asked for layer {layer}: the model has MoE layers 0 to {self.table.n_layers - 1}"
            )
        return tuple((number, layer) for number in range(self._split.n_devices))
