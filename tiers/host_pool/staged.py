"""One expert's place in host memory during one fill."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from expertier.tiers.host_pool.block import ExpertKey, HostBlock


class FreeRoom(Enum):
    """What a pool had for an expert that nobody waits for."""

    LENT = auto()
    """A block."""

    THERE = auto()
    """Its copy, or somebody who reads it just now."""

    NONE = auto()
    """No block that is free, and no room for more of them."""


@dataclass(slots=True, eq=False)
class Staged:
    """An expert on its way into a slot, and the block that the pool lent for it.

    Made empty by the caller, so that `HostPool.leave` can take back whatever `HostPool.stage` had done when
    it was interrupted. `hit`: the bytes are there already. `bounce`: the block is not the pool's and keeps
    nothing. `ahead`: nobody waits for it.
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
        assert self.block is not None, "stage first"
        return self.block.address
