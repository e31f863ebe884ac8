"""The tiers of one model: a manager for each device, on one device or on several.

    TierSet ─┬─► TierManager on the first device ──┐
             └─► TierManager on the second device ─┴─► one open file, one budget of host memory

A division decides what each manager holds: some of the layers (`layer_division.py`), or shards of every expert
(`shard_division.py`). A manager counts its layers from 0; tensors keep their names.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack

from expertier.errors import BudgetError
from expertier.interrupts import completing, opening
from expertier.tiers.config.config import TierConfig
from expertier.tiers.division import Division, Member
from expertier.tiers.file.byte_source import ByteSource
from expertier.tiers.file.source import FileSource
from expertier.tiers.host_pool.pool_share import PoolShare
from expertier.tiers.layer_division import LayerDivision
from expertier.tiers.manager import TierManager
from expertier.tiers.model.profile import ModelProfile
from expertier.tiers.model.table import ExpertTable
from expertier.tiers.shared.closed_by_with import ClosedByWith
from expertier.tiers.shared.stats import TierStats, summed
from expertier.tiers.split.split_source import SplitSource


class TierSet(ClosedByWith):
    """The managers of one model, opened and closed together. Thread-safe."""

    managers: tuple[TierManager, ...] = ()
    """The managers, one for each device, in the order of the division."""

    split_source: SplitSource | None = None
    """The source from which the managers read shards; None where experts are not cut."""

    _file: FileSource | None = None

    @opening
    def __init__(
        self, division: Division, *, config: TierConfig | None = None, source: ByteSource | None = None
    ) -> None:
        """Allocate the tiers of every device.

        Budgets in `config` are those of the whole model, and the division divides them. Without `source`, the table's
        files are opened once for all managers, and closed in `close`.

        Raises what `TierManager` raises; where there are several devices, a `BudgetError` names the device. On an error
        nothing stays allocated.
        """
        config = config if config is not None else TierConfig()
        self._division: Division = division
        table = division.table
        profile = ModelProfile.of(config.profile, table)
        members = division.members(config, profile)
        with ExitStack() as undo:
            if source is None:
                file = FileSource(table.files, config.file_mode, working_set_bytes=table.expert_bytes_total)
                undo.callback(file.close)
                self._file, source = file, file
            self.split_source = split = division.split_source(source)
            managers: list[TierManager] = []
            for number, member in enumerate(members):
                read_from = split.of_device(number) if split is not None else source
                manager = self._open(member, read_from, is_alone=len(members) == 1)
                undo.callback(manager.close)
                managers.append(manager)
            self.managers = tuple(managers)
            undo.pop_all()

    @classmethod
    def of(cls, manager: TierManager) -> TierSet:
        """Return a set that contains one open manager, for an engine that shall use it.

        Closing the set closes the manager.
        """
        tiers = cls.__new__(cls)
        tiers._division = LayerDivision.on_one(manager.table, manager.device)
        tiers.managers = (manager,)
        return tiers

    def _open(self, member: Member, source: ByteSource, *, is_alone: bool) -> TierManager:
        """Open the manager of one device."""
        total = self.table.expert_bytes_total
        try:
            return TierManager(
                member.table,
                device=member.device,
                config=member.config,
                source=source,
                needs=member.needs,
                compute_bytes=member.compute_bytes,
                profile=member.profile,
                share=PoolShare(self, member.table.expert_bytes_total / total),
                completes_layers=not self._division.completes_together,
            )
        except BudgetError as error:
            if is_alone:
                raise
            raise BudgetError(f"{member.device.name}, which has {member.holds}: {error}") from error

    @property
    def table(self) -> ExpertTable:
        """All of the model's experts."""
        return self._division.table

    @property
    def layers(self) -> tuple[tuple[int, ...], ...]:
        """The layers of each manager, by their number in the model."""
        return self._division.layers

    @property
    def arena_bytes(self) -> int:
        """L1's budget on all devices together, in bytes."""
        return sum(manager.arena_bytes for manager in self.managers)

    @property
    def slots(self) -> tuple[int, ...]:
        """How many slots each of the model's layers has; where several devices hold a layer, the smallest number."""
        return self._division.slots(manager.slots for manager in self.managers)

    def places_of(self, layer: int) -> tuple[tuple[TierManager, int], ...]:
        """Return (manager, number of the layer in it) for each manager that holds experts of one of the model's layers.

        Raises `IndexError` for a layer that the model does not have.
        """
        return tuple((self.managers[number], own) for number, own in self._division.places(layer))

    def prefetch(self, layer: int, experts: Iterable[int], *, into: str = "l1") -> None:
        """Fetch experts of one of the model's layers in the background, as `TierManager.prefetch` does."""
        wanted = list(experts)
        for manager, own in self.places_of(layer):
            manager.prefetch(own, wanted, into=into)

    def complete_layers(self) -> None:
        """Fetch the experts of layers with a slot for every expert, after an engine was bound to every manager.

        It does nothing where each manager did that by itself when an engine was bound to it.
        """
        if self._division.completes_together:
            for manager in self.managers:
                manager.engine.complete_layers()

    def drain(self) -> None:
        """Wait until no prefetch waits or runs."""
        for manager in self.managers:
            manager.drain()

    def require_no_leases_here(self, wish: str) -> None:
        """Raise `BusyError` where the calling thread holds slots, for which the action `wish` would wait."""
        for manager in self.managers:
            manager.require_no_leases_here(wish)

    def stats(self) -> TierStats:
        """Return the sums of the managers' sizes and counts."""
        return summed([manager.stats() for manager in self.managers])

    def check_valid(self) -> None:
        """Assert the invariants of every manager and of `split_source`. Nothing else may use the tiers."""
        for manager in self.managers:
            manager.check_valid()
        if self.split_source is not None:
            self.split_source.check_valid()

    @completing
    def close(self) -> None:
        """Free everything; a second call does nothing. Raises `BusyError` while a manager has leases or an engine."""
        for manager in self.managers:
            manager.close()
        if self._file is not None:
            self._file.close()
        if self.split_source is not None:
            self.split_source.forget()

    def _free(self) -> None:
        """Free what is allocated, after the constructor has failed."""
        self.close()
