"""The tiers of a model whose experts are cut up: each device has a shard of every expert, and a manager for its shards.

file ─► SplitSource ─┬─► TierManager on the first device:  its shards of all layers
                     └─► TierManager on the second device: its shards of all layers
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace

from expertier.errors import BudgetError
from expertier.hip.device import Device
from expertier.interrupts import completing, opening
from expertier.planner.budget.ledger import DeviceNeeds
from expertier.planner.budget.sizing_split import wishes_by_shards
from expertier.tiers.config.budget import all_copies_bytes
from expertier.tiers.config.config import TierConfig
from expertier.tiers.file.byte_source import ByteSource
from expertier.tiers.file.source import FileSource
from expertier.tiers.host_pool.pool_share import PoolShare
from expertier.tiers.manager import TierManager
from expertier.tiers.model.profile import ModelProfile
from expertier.tiers.split.split_source import SplitSource
from expertier.tiers.split.split_table import SplitTable
from expertier.tiers.tier_set import TierSet


class ShardSet(TierSet):
    """A set whose managers share every layer. Each counts the uses of its own shards."""

    source: SplitSource
    """What the managers read from."""

    @opening
    def __init__(
        self,
        split: SplitTable,
        devices: Sequence[Device],
        *,
        config: TierConfig | None = None,
        needs: Sequence[DeviceNeeds | None] | None = None,
        source: ByteSource | None = None,
    ) -> None:
        """Allocate the tiers of every device; `devices[i]` holds the shards of `split.tables[i]`.

        Budgets in `config` are those of all devices together: with a number for L1 every device has the same slots, the
        host pool's bytes are shared out in proportion to the shards, and `auto` is resolved device by device. The
        decode look-up on the device is off, as it would have one device wait for another. Without `source`, the set
        opens the table's files, and closes them again.

        Raises what `TierManager` does; a `BudgetError` names the device. On an error nothing stays allocated.
        """
        config = config if config is not None else TierConfig()
        table = split.full_table
        self._table = table
        self._layers = (tuple(range(table.n_layers)),) * split.n_devices
        profile = ModelProfile.of(config.profile, table)
        configs = _device_configs(split, config, profile)
        with ExitStack() as undo:
            if source is None:
                file = FileSource(table.files, config.file_mode, working_set_bytes=table.expert_bytes_total)
                undo.callback(file.close)
                self._file, source = file, file
            self.source = SplitSource(source, split)
            managers: list[TierManager] = []
            for number, (shards, device, own) in enumerate(zip(split.tables, devices, configs, strict=True)):
                try:
                    manager = TierManager(
                        shards,
                        device=device,
                        config=own,
                        source=self.source.of_device(number),
                        needs=needs[number] if needs is not None else None,
                        profile=profile,
                        share=PoolShare(self, shards.expert_bytes_total / table.expert_bytes_total),
                    )
                except BudgetError as error:
                    raise BudgetError(
                        f"{device.name}, which has shards of all {table.n_layers} layers: {error}"
                    ) from error
                undo.callback(manager.close)
                manager.engine.completes_layers = False  # at the same time, so that each expert is read once
                managers.append(manager)
            self.managers = tuple(managers)
            undo.pop_all()

    @property
    def slots(self) -> tuple[int, ...]:
        """How many slots each layer has: on the device that has the fewest."""
        return tuple(map(min, zip(*(manager.slots for manager in self.managers), strict=True)))

    def place_of(self, layer: int) -> tuple[TierManager, int]:
        """Return the first device's manager, which looks up what the others look up."""
        return super().place_of(layer)

    def prefetch(self, layer: int, experts: Iterable[int], *, into: str = "l1") -> None:
        """Have all shards of experts fetched in the background, as `TierManager.prefetch` does."""
        wanted = list(experts)
        for manager in self.managers:
            manager.prefetch(layer, wanted, into=into)

    def complete_layers(self) -> None:
        """Have layers with a slot for every expert fetched in the background, on all devices together."""
        for manager in self.managers:
            manager.engine.complete_layers()

    def check_valid(self) -> None:
        """Assert every manager's invariants, and the source's; call it while nothing else runs."""
        super().check_valid()
        self.source.check_valid()

    @completing
    def close(self) -> None:
        """Free everything; nothing to do the second time. `BusyError` while leases or an engine are at one of them."""
        super().close()
        if hasattr(self, "source"):  # else it was never opened
            self.source.forget()


def _device_configs(split: SplitTable, config: TierConfig, profile: ModelProfile) -> list[TierConfig]:
    """Return the config of each device: the sizes that `config` gives as numbers, shared out."""
    wishes = wishes_by_shards(
        config.wishes(),
        [shards.layer_demands() for shards in split.tables],
        [all_copies_bytes(shards) for shards in split.tables],
        profile.plan_uses,
    )
    # Each device would read full experts to fill its own pool with shards, so `auto` is off.
    fill = False if config.fill_pool == "auto" else config.fill_pool
    config = replace(config, decode_gate=False, fill_pool=fill)
    return [config.with_wishes(own) for own in wishes]
