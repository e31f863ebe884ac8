"""Copies in host memory from which the slots of several experts are filled at once."""

from __future__ import annotations

from dataclasses import dataclass, field

from expertier.tiers.host_pool.block import HostBlock


@dataclass(slots=True, eq=False)
class AcquiredCopies:
    """The copies in use by one batch: `blocks[i]` has the bytes of the expert at `indices[i]` of those asked for.

    The caller makes it empty, so that `HostPool.release_copies` finds every block in it that an interrupted
    `HostPool.acquire_copies` had added.
    """

    indices: list[int] = field(default_factory=list)
    blocks: list[HostBlock] = field(default_factory=list)

    @property
    def addresses(self) -> list[int]:
        """Where the blocks begin."""
        return [block.address for block in self.blocks]
