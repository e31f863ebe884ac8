"""Where llama.cpp puts the blocks of a model: on which devices, and how many on each."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from expertier.tiers.model.table import ExpertTable

if TYPE_CHECKING:  # for annotations only, because importing it would be a cycle
    from expertier.engine_adapter.placement.tensor_split import TensorSplit

ALL_UNITS = 1
"""The units of a device that has the full model; any number does, because the blocks are not split."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The engine's names of the devices, in their order, and how many units lie on each: blocks, and the output last.

    llama.cpp gets these integers as its `tensor_split`. It compares (block / all) with (sum of units / all).
    Both are single-precision quotients of integers by the same integer, so it places exactly these blocks.
    """

    devices: tuple[str, ...]
    units: tuple[int, ...]
    tensors: TensorSplit | None = None
    """How tensors are split among the devices, under tensor split: every device then has a shard of every block."""

    @classmethod
    def on_one(cls, device: str) -> Placement:
        """Return the placement of the full model on one device."""
        return cls((device,), (ALL_UNITS,))

    @property
    def is_split(self) -> bool:
        """Whether several devices share the blocks."""
        return len(self.devices) > 1

    @property
    def device_name(self) -> str:
        """The devices' names, as MOE_DEVICE takes them."""
        return ",".join(self.devices)

    def blocks(self) -> list[range]:
        """Return the blocks of each device where they are split; the number after the last block is the output."""
        ends = list(accumulate(self.units))
        return [range(end - units, end) for end, units in zip(ends, self.units, strict=True)]

    def layers(self, table: ExpertTable) -> list[tuple[int, ...]]:
        """Return the layers of `table`, which count from 0, on each device."""
        if not self.is_split:
            return [tuple(range(table.n_layers))]
        return [
            tuple(number for number, layer in enumerate(table.layers) if layer.block in blocks)
            for blocks in self.blocks()
        ]
