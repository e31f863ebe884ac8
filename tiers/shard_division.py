"""Divides every expert into a shard for each device, for a model that an engine splits tensor by tensor.

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
    """A `Division` that puts shards of every expert on every device. Each manager counts the uses of its own shards."""

    completes_together = True
    """All managers fetch the same experts at the same time, so that each expert is read once for all of its shards."""

    def __init__(
        self, split: SplitTable, devices: Sequence[Device], needs: Sequence[DeviceNeeds | None] | None = None
    ) -> None:
        """Have `devices[i]` hold the shards of `split.tables[i]`; `needs[i]` is what an engine takes of it besides."""
        self.table = split.full_table
        self.layers = (tuple(range(self.table.n_layers)),) * split.n_devices
        self._split = split
        self._devices = tuple(devices)
        self._needs = tuple(needs) if needs is not None else (None,) * split.n_devices

    def members(self, config: TierConfig, profile: ModelProfile) -> list[Member]:
        """Return what each manager is made of, with the sizes in `config` divided among the devices.

        Where L1's size is a number, every device gets the same slots. The host pool's bytes are divided in proportion
        to the shards, and `auto` is resolved for each device by itself. Look-ups on the device are off, because a
        device that waits for its own misses would hold up the other devices.
        """
        tables = self._split.tables
        wishes = wishes_by_shards(
            config.wishes(),
            [shards.layer_demands() for shards in tables],
            [all_copies_bytes(shards) for shards in tables],
            profile.plan_uses,
        )
        # Each device would read full experts to fill its own pool with shards, so `auto` means off here.
        fill = False if config.fill_pool == "auto" else config.fill_pool
        config = replace(config, decode_gate=False, fill_pool=fill)
        holds = f"shards of all {self.table.n_layers} layers"
        return [
            Member(shards, device, config.with_wishes(own), profile, holds, needs)
            for shards, device, own, needs in zip(tables, self._devices, wishes, self._needs, strict=True)
        ]

    def split_source(self, source: ByteSource) -> SplitSource:
        """Return a source that reads each expert once and hands its shards to the managers."""
        return SplitSource(source, self._split)

    def slots(self, of_managers: Iterable[Sequence[int]]) -> tuple[int, ...]:
        """Return for each layer the smallest number of slots that it has on any device."""
        return tuple(map(min, zip(*of_managers, strict=True)))

    def places(self, layer: int) -> tuple[tuple[int, int], ...]:
        """Return (number of the manager, layer) for all managers, as each holds shards of every layer.

        Raises `IndexError` for a layer that the model does not have.
        """
        if layer not in range(self.table.n_layers):
            raise IndexError(
                f"asked for layer {layer}: the model has MoE layers 0 to {self.table.n_layers - 1}"
            )
        return tuple((number, layer) for number in range(self._split.n_devices))
