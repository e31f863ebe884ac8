"""The blocks of one size in the host pool."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from expertier.tiers.host_pool.block import BlockState, ExpertKey, HostBlock, HostChunk


class SizeClass:
    """All chunks whose blocks have `block_bytes`: a list of FREE blocks, and the other blocks in their order of use.

    Not thread-safe; the pool's lock guards it. `unit_bytes` is what the allocator takes for the smallest chunk, which
    has one block. `growing` says that a thread is allocating a chunk for this class.
    """

    def __init__(self, block_bytes: int, unit_bytes: int) -> None:
        """Start without chunks."""
        self.block_bytes = block_bytes
        self.unit_bytes = unit_bytes
        self.content_bytes = 0  # the bytes of the largest expert seen, before any rounding
        self.taken_bytes = 0  # the bytes of all chunks after the allocator's rounding
        self.n_blocks = 0
        self.growing = False
        self.chunks: dict[int, HostChunk] = {}
        self.free: dict[HostBlock, None] = {}
        self.order: OrderedDict[ExpertKey, HostBlock] = OrderedDict()

    def add(self, chunk: HostChunk) -> None:
        """Add a new chunk, all of whose blocks are FREE."""
        self.chunks[chunk.number] = chunk
        self.taken_bytes += chunk.n_bytes
        self.n_blocks += len(chunk.blocks)
        self.free.update(dict.fromkeys(reversed(chunk.blocks)))  # reversed: the last one is used first

    def remove(self, chunk: HostChunk) -> list[ExpertKey]:
        """Remove an idle chunk; return the experts whose copies were in it."""
        del self.chunks[chunk.number]
        self.taken_bytes -= chunk.n_bytes
        self.n_blocks -= len(chunk.blocks)
        lost = []
        for block in chunk.blocks:
            if block.key is None:
                del self.free[block]
            else:
                lost.append(block.key)
                self.take_off(block)
        return lost

    def take_free(self) -> HostBlock | None:
        """Return a FREE block that no queued copy reads, taken off the list; None where there is none."""
        for block in reversed(self.free):
            if block.is_quiet():
                del self.free[block]
                return block
        return None

    def put_on(self, block: HostBlock, key: ExpertKey) -> None:
        """Give a block to an expert, as FILLING and the most recently used one."""
        block.state, block.key = BlockState.FILLING, key
        self.order[key] = block

    def take_off(self, block: HostBlock) -> None:
        """Take a block from its expert: it is then FREE but in no list."""
        assert block.key is not None, block
        del self.order[block.key]
        block.key, block.state, block.used_at = None, BlockState.FREE, 0

    def oldest(self, is_read: Callable[[ExpertKey], bool] | None = None) -> HostBlock | None:
        """Return the least recently used RESIDENT block that nothing reads; None where there is none.

        `is_read` says whether the engine's C++ reads an expert's copy now, which `users` does not count.
        """
        for key, block in self.order.items():
            if not block.users and block.is_quiet() and not (is_read is not None and is_read(key)):
                return block
        return None

    def awaited(self) -> HostBlock | None:
        """Return a block that no fill uses but queued copies still read; None where there is none."""
        for block in (*self.free, *self.order.values()):
            if not block.users and block.fences:
                return block
        return None

    def check_valid(self) -> None:
        """Assert that each block of each chunk is in exactly one list, and in the state that the list means."""
        blocks = [block for chunk in self.chunks.values() for block in chunk.blocks]
        assert self.taken_bytes == sum(chunk.n_bytes for chunk in self.chunks.values())
        assert self.n_blocks == len(blocks), f"{self.n_blocks} blocks counted, there are {len(blocks)}"
        assert len(self.free) + len(self.order) == len(blocks), "a block is in no list, or in two"
        assert {*self.free, *self.order.values()} == set(blocks), "a block of no chunk"
        for chunk in self.chunks.values():
            assert chunk.block_bytes == self.block_bytes, chunk.block_bytes
            assert len(chunk.blocks) * self.block_bytes <= chunk.n_bytes, "blocks beyond their chunk"
            assert chunk.n_in_use == sum(block.users > 0 for block in chunk.blocks), "blocks in use"
        for block in self.free:
            assert (block.state, block.key, block.users) == (BlockState.FREE, None, 0), block.state
        for key, block in self.order.items():
            assert block.key == key, f"{block.key} is listed as {key}"
            assert block.state is not BlockState.FREE, key
            assert block.state is BlockState.RESIDENT or block.users == 1, f"{key} filled by {block.users}"
        uses = [block.used_at for block in self.order.values()]
        assert uses == sorted(uses), "the order of use and the list differ"
