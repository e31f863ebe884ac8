"""One fill: an expert on its way into a slot or into the host pool, and the block that it uses meanwhile."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from expertier.tiers.host_pool.block import ExpertKey, HostBlock


class FreeRoom(Enum):
    """The outcome of `HostPool.begin_fill_ahead`."""

    BEGUN = auto()
    """The handle has a free block to read the expert into."""

    PRESENT = auto()
    """The pool has a copy already, or another fill is reading one."""

    NONE = auto()
    """No block is free, and there is no room for another one."""


@dataclass(slots=True, eq=False)
class FillHandle:
    """The expert `key` that is being filled, and its block in the host pool while the fill lasts.

    `n_bytes` is what a host block needs to hold the expert, and `expert_bytes` what its matrices have without gaps.
    `hit`: the block holds the expert's bytes already. `bounce`: it is a bounce block, which is reused after the fill.
    `ahead`: the fill was begun ahead of demand, so nothing waits for it.

    The caller creates the handle, and `HostPool.begin_fill` notes in it what was done. So `HostPool.end_fill` can undo
    everything, even where an interrupt has ended `begin_fill`.
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
        """The address of the expert's block."""
        assert self.block is not None, "begin_fill first"
        return self.block.address
