"""How the experts of a model are divided over devices: what each device's manager gets, and how they act together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from expertier.hip.device import Device
from expertier.planner.budget.ledger import DeviceNeeds
from expertier.tiers.config.config import TierConfig
from expertier.tiers.file.byte_source import ByteSource
from expertier.tiers.model.profile import ModelProfile
from expertier.tiers.model.table import ExpertTable
from expertier.tiers.split.split_source import SplitSource


@dataclass(frozen=True, slots=True)
class Member:
    """What the manager of one device is made of. `holds` says which experts it has, for messages."""

    table: ExpertTable
    device: Device
    config: TierConfig
    profile: ModelProfile
    holds: str
    needs: DeviceNeeds | None = None
    compute_bytes: int = 0


class Division(Protocol):
    """A model's experts on one device or on several."""

    @property
    def table(self) -> ExpertTable:
        """All of the model's experts."""

    @property
    def layers(self) -> tuple[tuple[int, ...], ...]:
        """The layers of each manager, by their number in the model."""

    @property
    def completes_together(self) -> bool:
        """Whether layers with a slot for every expert are fetched once all managers are bound, and not one by one."""

    def members(self, config: TierConfig, profile: ModelProfile) -> Sequence[Member]:
        """Return what each manager is made of; budgets in `config` are shared out. Raises `BudgetError`."""

    def split_source(self, source: ByteSource) -> SplitSource | None:
        """Return what the managers read shards of experts from; None where each reads full experts from `source`."""

    def slots(self, of_managers: Iterable[Sequence[int]]) -> tuple[int, ...]:
        """Return how many slots each of the model's layers has, given those of each manager's layers."""

    def places(self, layer: int) -> tuple[tuple[int, int], ...]:
        """Return the managers that hold experts of a layer, and the layer's number there.

        Raises `IndexError` for a layer that the model does not have.
        """
