"""One fill of the host pool: an expert, and the block that it has meanwhile."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from expertier.tiers.host_pool.block import ExpertKey, HostBlock


class FreeRoom(Enum):
    """What came of a fill that nobody waits for."""

    BEGUN = auto()
    """The handle has a free block to read the expert into."""

    PRESENT = auto()
    """The pool has a copy already, or another fill is reading one."""

    NONE = auto()
    """No block is free, and there is no room for another one."""


@dataclass(slots=True, eq=False)
class FillHandle:
    """An expert on its way into a slot, and its block in the host pool while the fill lasts.

    The caller makes it empty, so that `HostPool.end_fill` can undo whatever an interrupted `HostPool.begin_fill`
    had done. `hit`: the block holds the expert's bytes already. `bounce`: it is a bounce block, which keeps nothing.
    `ahead`: nobody waits for the fill.
    """

    key: ExpertKey
    n_bytes: int
    expert_bytes: int
    block: HostBlock | None = None
    hit: bool = False
    bounce: bool = False
    ahead: bool = False

    @property
    def address(self) -> int:
        """Where the expert's block begins."""
        assert self.block is not None, "begin_fill first"
        return self.block.address
