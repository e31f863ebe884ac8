"""The tiers of one model on several devices: a manager for each, over the layers that lie there.

    TierSet ─┬─► TierManager on the first device:  layers 0, 1, 2 ─┐
             └─► TierManager on the second device: layers 3, 4 ────┴─► one open file, one budget of host memory

Each expert belongs to one manager, so that it is read once and kept once in the host pools. A manager counts its
layers from 0; tensors keep their names.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeAlias

from expertier.errors import BudgetError, BusyError
from expertier.hip.device import Device
from expertier.interrupts import completing, not_interrupted_at_entry, opening
from expertier.planner.budget.ledger import DeviceNeeds
from expertier.planner.budget.sizing_split import wishes_by_layers
from expertier.tiers.config.budget import all_copies_bytes
from expertier.tiers.config.config import TierConfig
from expertier.tiers.file.byte_source import ByteSource
from expertier.tiers.file.source import FileSource
from expertier.tiers.host_pool.pool_share import PoolShare
from expertier.tiers.manager import TierManager
from expertier.tiers.model.profile import ModelProfile
from expertier.tiers.model.table import ExpertTable
from expertier.tiers.shared.stats import TierStats, summed


@dataclass(frozen=True, slots=True)
class DeviceShare:
    """A device and the layers whose experts it holds, with what an engine takes of it beside them.

    `compute_bytes` of that are an engine's compute buffers in the slab, as `TierManager` takes them.
    """

    device: Device
    layers: tuple[int, ...]
    needs: DeviceNeeds | None = None
    compute_bytes: int = 0


class TierSet:
    """The managers of one model, opened and closed together. Thread-safe, as they are."""

    managers: tuple[TierManager, ...] = ()
    """One for each device, in the order of the shares."""

    _file: FileSource | None = None

    @opening
    def __init__(
        self,
        table: ExpertTable,
        shares: Sequence[DeviceShare],
        *,
        config: TierConfig | None = None,
        source: ByteSource | None = None,
    ) -> None:
        """Allocate the tiers of every device; each layer is in exactly one share, and each share has one.

        Budgets in `config` are those of the whole: the bytes for slots are shared out as one plan over all layers has
        them, the host pool's in proportion to the experts. `auto` is resolved device by device. Without `source`, the
        table's file is opened and closed again here, once.

        Raises what `TierManager` does; a `BudgetError` names the device. On an error nothing stays allocated.
        """
        config = config if config is not None else TierConfig()
        placed = sorted(layer for share in shares for layer in share.layers)
        if placed != list(range(table.n_layers)) or not all(share.layers for share in shares):
            raise ValueError(f"layers {placed} of {table.n_layers} in {len(shares)} shares, each needs some")
        self._table = table
        self._layers = tuple(share.layers for share in shares)
        profile = ModelProfile.of(config.profile, table)
        configs = _share_configs(table, config, self._layers, profile)
        with ExitStack() as undo:
            if source is None:
                file = FileSource(table.files, config.file_mode, working_set_bytes=table.expert_bytes_total)
                undo.callback(file.close)
                self._file, source = file, file
            managers: list[TierManager] = []
            for share, own in zip(shares, configs, strict=True):
                of_share = table.of_layers(share.layers)
                try:
                    manager = TierManager(
                        of_share,
                        device=share.device,
                        config=own,
                        source=source,
                        needs=share.needs,
                        compute_bytes=share.compute_bytes,
                        profile=profile.of_layers(
                            share.layers, max(layer.n_experts for layer in of_share.layers)
                        ),
                        share=PoolShare(self, of_share.expert_bytes_total / table.expert_bytes_total),
                    )
                except BudgetError as error:
                    raise BudgetError(
                        f"{share.device.name}, which has {len(share.layers)} of {table.n_layers} layers with "
                        f"experts: {error}"
                    ) from error
                undo.callback(manager.close)
                managers.append(manager)
            self.managers = tuple(managers)
            undo.pop_all()

    @property
    def table(self) -> ExpertTable:
        """All of the model's experts."""
        return self._table

    @property
    def layers(self) -> tuple[tuple[int, ...], ...]:
        """The layers of each manager, by their number in the model."""
        return self._layers

    @property
    def arena_bytes(self) -> int:
        """L1's budget on all devices."""
        return sum(manager.arena_bytes for manager in self.managers)

    @property
    def slots(self) -> tuple[int, ...]:
        """How many slots each of the model's layers has."""
        slots = [0] * self._table.n_layers
        for manager, layers in zip(self.managers, self._layers, strict=True):
            for layer, n_slots in zip(layers, manager.slots, strict=True):
                slots[layer] = n_slots
        return tuple(slots)

    def place_of(self, layer: int) -> tuple[TierManager, int]:
        """Return the manager of one of the model's layers, and the number that it has there."""
        for manager, layers in zip(self.managers, self._layers, strict=True):
            if layer in layers:
                return manager, layers.index(layer)
        raise IndexError(f"asked for layer {layer}: the model has MoE layers 0 to {self._table.n_layers - 1}")

    def prefetch(self, layer: int, experts: Iterable[int], *, into: str = "l1") -> None:
        """Have experts of a layer of the model fetched in the background, as `TierManager.prefetch` does."""
        manager, own = self.place_of(layer)
        manager.prefetch(own, experts, into=into)

    def drain(self) -> None:
        """Wait until no prefetch waits or runs."""
        for manager in self.managers:
            manager.drain()

    def require_no_leases_here(self, wish: str) -> None:
        """Raise `BusyError` where this thread's own leases hold slots that `wish` would wait for."""
        for manager in self.managers:
            manager.require_no_leases_here(wish)

    def stats(self) -> TierStats:
        """Return the sums of what the managers hold and have counted."""
        return summed([manager.stats() for manager in self.managers])

    def check_valid(self) -> None:
        """Assert every manager's invariants; call it while nothing else runs."""
        for manager in self.managers:
            manager.check_valid()

    @completing
    def close(self) -> None:
        """Free everything; nothing to do the second time. `BusyError` while leases or an engine are at one of them."""
        for manager in self.managers:
            manager.close()
        if self._file is not None:
            self._file.close()

    def _free(self) -> None:
        """Free what is there, where opening has failed."""
        self.close()

    @not_interrupted_at_entry
    def __enter__(self) -> Self:
        """Return the set itself."""
        return self

    @not_interrupted_at_entry
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close; where that is refused and an error is on its way already, the error gets a note of it."""
        try:
            self.close()
        except BusyError as busy:
            if error is None:
                raise
            error.add_note(f"the tiers stay allocated: {busy}")


Tiers: TypeAlias = TierManager | TierSet
"""A model's tiers, on one device or on several."""


def managers(tiers: Tiers) -> tuple[TierManager, ...]:
    """Return the managers, one a device."""
    return tiers.managers if isinstance(tiers, TierSet) else (tiers,)


def _share_configs(
    table: ExpertTable, config: TierConfig, layers: Sequence[Sequence[int]], profile: ModelProfile
) -> list[TierConfig]:
    """Return the config of each share: the sizes that `config` gives as numbers, shared out."""
    copies = [all_copies_bytes(table.of_layers(share)) for share in layers]
    wishes = wishes_by_layers(config.wishes(), table.layer_demands(), layers, copies, profile.plan_uses)
    return [config.with_wishes(own) for own in wishes]
