"""One expert's place in host memory during one fill."""

from __future__ import annotations

from dataclasses import dataclass

from expertier.tiers.host_block import ExpertKey, HostBlock


@dataclass(slots=True, eq=False)
class Staged:
    """An expert on its way into a slot, and the block that the pool lent for it.

    Made empty by the caller, so that `HostPool.leave` can take back whatever `HostPool.stage` had done when
    it was interrupted. `hit`: the bytes are there already. `bounce`: the block is not the pool's and keeps
    nothing.
    """

    key: ExpertKey
    n_bytes: int
    expert_bytes: int
    block: HostBlock | None = None
    hit: bool = False
    bounce: bool = False

    @property
    def address(self) -> int:
        """Where the expert's block begins."""
        assert self.block is not None, "stage first"
        return self.block.address
