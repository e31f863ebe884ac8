"""How the experts of a model are divided over devices: what each device's manager holds, and how managers cooperate."""

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
    """What the manager of one device is made of: the arguments of `TierManager`.

    `holds` says in words which experts it has, for messages.
    """

    table: ExpertTable
    device: Device
    config: TierConfig
    profile: ModelProfile
    holds: str
    needs: DeviceNeeds | None = None
    compute_bytes: int = 0


class Division(Protocol):
    """The protocol of a division of a model's experts over one device or several."""

    @property
    def table(self) -> ExpertTable:
        """All of the model's experts."""

    @property
    def layers(self) -> tuple[tuple[int, ...], ...]:
        """The layers of each manager, by their number in the model."""

    @property
    def completes_together(self) -> bool:
        """When layers with a slot for every expert are fetched: True: once an engine is bound to all managers.

        False: for each manager as soon as an engine is bound to it.
        """

    def members(self, config: TierConfig, profile: ModelProfile) -> Sequence[Member]:
        """Return what each manager is made of, with the budgets in `config` divided. Raises `BudgetError`."""

    def split_source(self, source: ByteSource) -> SplitSource | None:
        """Return the source of the managers' shards; None where the managers read full experts from `source`."""

    def slots(self, of_managers: Iterable[Sequence[int]]) -> tuple[int, ...]:
        """Return the number of slots of each of the model's layers; `of_managers` has those of each manager."""

    def places(self, layer: int) -> tuple[tuple[int, int], ...]:
        """Return (number of the manager, number of the layer in it) for each manager that holds experts of a layer.

        Raises `IndexError` for a layer that the model does not have.
        """
