"""Two blocks of pinned memory through which fills go where the host pool has no block for them, or is off."""

from __future__ import annotations

from expertier.hip.device import Device
from expertier.hip.fence import Fence
from expertier.tiers.host_pool.block import HostBlock, HostChunk
from expertier.tiers.host_pool.budget import Account, HostBudget

N_BOUNCE_BLOCKS = 2


class BounceBlocks:
    """Blocks that serve one fill at a time and keep no copy after it. Not thread-safe; the pool's lock guards it."""

    def __init__(self, device: Device, budget: HostBudget, account: Account, block_bytes: int) -> None:
        """Allocate the blocks, which count beside the budget's limit and not against it.

        Raises `DeviceError`, with nothing left allocated, where the allocator refuses.
        """
        self._device = device
        self._budget = budget
        self._account = account
        self._all: list[HostBlock] = []
        self._idle: list[HostBlock] = []
        n_bytes = device.pinned_allocation_bytes(block_bytes)
        try:
            for number in range(N_BOUNCE_BLOCKS):
                address = device.alloc_pinned(block_bytes)
                self._all += HostChunk.cut(number, address, n_bytes, block_bytes, 1).blocks
                budget.add_bounce(account, n_bytes)
        except BaseException:
            self.close()
            raise
        self._idle.extend(self._all)

    def idle(self) -> HostBlock | None:
        """Return a block that no fill uses and no queued copy reads; None where there is none."""
        for block in reversed(self._idle):
            if block.is_quiet():
                return block
        return None

    def take(self, block: HostBlock) -> None:
        """Take an idle block into use."""
        self._idle.remove(block)

    def put_back(self, block: HostBlock) -> None:
        """Note that a block's fill has ended; queued copies may still read the block."""
        self._idle.append(block)

    def awaited(self) -> HostBlock | None:
        """Return a block that no fill uses but queued copies still read; None where there is none."""
        return next((block for block in self._idle if block.fences), None)

    def fences(self) -> list[Fence]:
        """Return the fences of all queued copies that read the blocks."""
        return [fence for block in self._all for fence in block.fences]

    def check_valid(self) -> None:
        """Assert that each block is either in use or idle, and that the bytes of all blocks are counted."""
        assert len(set(self._idle)) == len(self._idle), "a bounce block is idle twice"
        for block in self._all:
            assert block.users == (block not in self._idle), f"{block.users} fills use a bounce block"
        assert self._account.bounce_bytes == sum(block.chunk.n_bytes for block in self._all), "bounce bytes"

    def close(self) -> None:
        """Free the blocks; no fill and no queued copy may use one. A second call does nothing."""
        assert not any(block.users for block in self._all), "close during a fill"
        self._idle.clear()
        while self._all:
            chunk = self._all.pop().chunk
            self._device.free(chunk.address)
            self._budget.add_bounce(self._account, -chunk.n_bytes)
