"""The copies in host memory from which one batch fills the slots of several experts."""

from __future__ import annotations

from dataclasses import dataclass, field

from expertier.tiers.host_pool.block import HostBlock


@dataclass(slots=True, eq=False)
class AcquiredCopies:
    """The copies that one batch uses: `blocks[i]` holds the expert at index `indices[i]` of those asked for.

    The caller creates it empty, and `HostPool.acquire_copies` adds to it. So `HostPool.release_copies` finds every
    block that was acquired, even where an interrupt has ended `acquire_copies`.
    """

    indices: list[int] = field(default_factory=list)
    blocks: list[HostBlock] = field(default_factory=list)

    @property
    def addresses(self) -> list[int]:
        """The addresses of the blocks."""
        return [block.address for block in self.blocks]
