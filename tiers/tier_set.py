"""The tiers of one model: a manager a device, on one device or on several.

    TierSet ─┬─► TierManager on the first device ──┐
             └─► TierManager on the second device ─┴─► one open file, one budget of host memory

A division decides what each manager holds: layers (`layer_division.py`), of which each is on one device, or shards
of every expert (`shard_division.py`). A manager counts its layers from 0; tensors keep their names.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from expertier.errors import BudgetError, BusyError
from expertier.interrupts import completing, not_interrupted_at_entry, opening
from expertier.tiers.config.config import TierConfig
from expertier.tiers.division import Division, Member
from expertier.tiers.file.byte_source import ByteSource
from expertier.tiers.file.source import FileSource
from expertier.tiers.host_pool.pool_share import PoolShare
from expertier.tiers.layer_division import LayerDivision
from expertier.tiers.manager import TierManager
from expertier.tiers.model.profile import ModelProfile
from expertier.tiers.model.table import ExpertTable
from expertier.tiers.shared.stats import TierStats, summed
from expertier.tiers.split.split_source import SplitSource


class TierSet:
    """The managers of one model, opened and closed together. Thread-safe, as they are."""

    managers: tuple[TierManager, ...] = ()
    """One for each device, in the order of the division."""

    split_source: SplitSource | None = None
    """What hands out shards of experts; None where experts are not cut."""

    _file: FileSource | None = None

    @opening
    def __init__(
        self, division: Division, *, config: TierConfig | None = None, source: ByteSource | None = None
    ) -> None:
        """Allocate the tiers of every device.

        Budgets in `config` are those of the whole model, and the division shares them out. Without `source`, the
        table's files are opened and closed again here, once.

        Raises what `TierManager` does; where there are several devices, a `BudgetError` names the device. On an error
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
                manager.engine.completes_layers = not division.completes_together
                managers.append(manager)
            self.managers = tuple(managers)
            undo.pop_all()

    @classmethod
    def of(cls, manager: TierManager) -> TierSet:
        """Return a set of one manager that is open already, for an engine that is to use it.

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
        """L1's budget on all devices."""
        return sum(manager.arena_bytes for manager in self.managers)

    @property
    def slots(self) -> tuple[int, ...]:
        """How many slots each of the model's layers has: on the device that has the fewest, where several hold it."""
        return self._division.slots(manager.slots for manager in self.managers)

    def places_of(self, layer: int) -> tuple[tuple[TierManager, int], ...]:
        """Return the managers that hold experts of one of the model's layers, and the number that it has there.

        Raises `IndexError` for a layer that the model does not have.
        """
        return tuple((self.managers[number], own) for number, own in self._division.places(layer))

    def prefetch(self, layer: int, experts: Iterable[int], *, into: str = "l1") -> None:
        """Have experts of a layer of the model fetched in the background, as `TierManager.prefetch` does."""
        wanted = list(experts)
        for manager, own in self.places_of(layer):
            manager.prefetch(own, wanted, into=into)

    def complete_layers(self) -> None:
        """Have layers with a slot for every expert fetched in the background, once engines are bound to all managers.

        Managers of which each has its own layers have done so as they were bound.
        """
        if self._division.completes_together:
            for manager in self.managers:
                manager.engine.complete_layers()

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
        """Assert the invariants of every manager, and of what they read from; call it while nothing else runs."""
        for manager in self.managers:
            manager.check_valid()
        if self.split_source is not None:
            self.split_source.check_valid()

    @completing
    def close(self) -> None:
        """Free everything; nothing to do the second time. `BusyError` while leases or an engine are at one of them."""
        for manager in self.managers:
            manager.close()
        if self._file is not None:
            self._file.close()
        if self.split_source is not None:
            self.split_source.forget()

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
