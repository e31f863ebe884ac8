"""A block of host memory."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeAlias

ExpertKey: TypeAlias = tuple[int, int]
"""(layer, expert)"""


class BlockState(Enum):
    """What a block holds; the arrows are in `host_pool.py`."""

    FREE = auto()
    FILLING = auto()
    RESIDENT = auto()


@dataclass(slots=True, eq=False)
class HostBlock:
    """A block that the pool took from the allocator: `n_bytes` as the allocator rounds them.

    `users` are the fills that read from it or write to it now.
    """

    address: int
    n_bytes: int
    state: BlockState = BlockState.FREE
    key: ExpertKey | None = None
    users: int = 0
