"""Blocks of pinned host memory, and the chunks that they are cut from."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TypeAlias

from expertier.hip.fence import Fence

ExpertKey: TypeAlias = tuple[int, int]
"""(layer, expert)"""


class BlockState(Enum):
    """What a block holds; `host_pool/pool.py` draws the transitions."""

    FREE = auto()
    FILLING = auto()
    RESIDENT = auto()


@dataclass(slots=True, eq=False)
class HostChunk:
    """One allocation, cut into blocks of `block_bytes`; `n_bytes` is its size after the allocator's rounding.

    `number` counts the chunks of the pool and breaks ties of `coldness`. `n_in_use` is the number of blocks that fills
    use now.
    """

    number: int
    address: int
    n_bytes: int
    block_bytes: int
    blocks: list[HostBlock] = field(default_factory=list)
    n_in_use: int = 0

    @classmethod
    def cut(cls, number: int, address: int, n_bytes: int, block_bytes: int, n_blocks: int) -> HostChunk:
        """Make a chunk with its blocks, all FREE."""
        chunk = cls(number, address, n_bytes, block_bytes)
        chunk.blocks.extend(HostBlock(address + i * block_bytes, chunk) for i in range(n_blocks))
        return chunk

    @property
    def coldness(self) -> tuple[int, int]:
        """A sort key: the chunk whose blocks were last used longest ago, on average, comes first."""
        return sum(block.used_at for block in self.blocks) // len(self.blocks), self.number

    def is_idle(self) -> bool:
        """Whether no fill and no queued copy uses any block of the chunk."""
        return self.n_in_use == 0 and all(block.is_quiet() for block in self.blocks)


@dataclass(slots=True, eq=False)
class HostBlock:
    """Room for a copy of one expert.

    `users` counts the fills that read or write the block now. `fences` mark the ends of queued copies that may still
    read it. `used_at` is the pool's count of uses at the time of the block's last use; it is 0 for a FREE block. A copy
    that was never used has a negative number, and a later one has a lower number.
    """

    address: int
    chunk: HostChunk
    state: BlockState = BlockState.FREE
    key: ExpertKey | None = None
    users: int = 0
    used_at: int = 0
    fences: tuple[Fence, ...] = ()

    def is_quiet(self) -> bool:
        """Whether no queued copy reads the block any more (I10); drops the fences that are done."""
        if len(self.fences) == 1:  # the usual case, made fast because every block of a batch is asked
            if self.fences[0].done():
                self.fences = ()
        elif self.fences:
            self.fences = tuple(fence for fence in self.fences if not fence.done())
        return not self.fences
