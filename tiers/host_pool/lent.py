"""Copies in host memory that several experts' slots are filled from at once."""

from __future__ import annotations

from dataclasses import dataclass, field

from expertier.tiers.host_pool.block import HostBlock


@dataclass(slots=True, eq=False)
class Lent:
    """What the pool lends for one batch: `blocks[i]` has the bytes of the expert at `indices[i]` of those asked for.

    Made empty by the caller, so that `HostPool.take_back` has all of what `HostPool.lend` had lent when it was
    interrupted.
    """

    indices: list[int] = field(default_factory=list)
    blocks: list[HostBlock] = field(default_factory=list)

    @property
    def addresses(self) -> list[int]:
        """Where the blocks begin."""
        return [block.address for block in self.blocks]
