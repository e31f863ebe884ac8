"""The host pool, L2: copies of experts in pinned host memory, within a budget.

A block goes through these states; a fill is the pair `stage` / `leave`, with `commit` between them when the
bytes had to be read:

              stage (miss)            commit
    FREE ──────────────────► FILLING ────────► RESIDENT ◄─┐
      ▲                         │                │  └─────┘ stage (hit), refresh: to the young end of the
      order ├──── leave (aborts) ─────┘                │ └──── stage for another expert (evicts the oldest
      that no fill uses) ◄──┘

The budget counts what the allocator takes, FREE and FILLING blocks included, at every instant (I3). Where no
block can be had for an expert (the pool is off, too small, or all of it is in use by other fills), the fill
goes through one of two bounce blocks, which are allocated at the start, beside the budget, and keep nothing.

Order of use (the eviction order): an L2 hit and a fill are uses, and so is the expert's eviction from L1
(`refresh`); an L1 hit is none.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable

from expertier.hip.device import Device
from expertier.tiers.host_block import BlockState, ExpertKey, HostBlock
from expertier.tiers.staged import Staged
from expertier.tiers.stats import L2Stats

N_BOUNCE_BLOCKS = 2


class HostPool:
    """Blocks of pinned host memory, one an expert copy, least recently used first out.

    Thread-safe: its lock is held for book-keeping only, never during a read or a copy.
    """

    def __init__(self, device: Device, *, budget_bytes: int, largest_block_bytes: int) -> None:
        """Allocate the bounce blocks; `budget_bytes` of 0 switches the pool off.

        `largest_block_bytes` is the most that `stage` will ask for. Raises `DeviceError`.
        """
        self._device = device
        self._budget_bytes = budget_bytes
        self._changed = threading.Condition(threading.Lock())
        self._blocks: OrderedDict[ExpertKey, HostBlock] = OrderedDict()
        self._free: dict[int, list[HostBlock]] = {}
        self._used_bytes = self._peak_bytes = 0
        self._in_use_bytes = 0  # of blocks that fills use now: these cannot be evicted
        self._hits = self._misses = self._evictions = self._bytes_in = 0
        self._bounce: list[HostBlock] = []
        self._bounce_idle: list[HostBlock] = []
        try:
            for _ in range(N_BOUNCE_BLOCKS):
                address = device.alloc_pinned(largest_block_bytes)
                self._bounce.append(HostBlock(address, device.allocation_bytes(largest_block_bytes)))
        except BaseException:
            self.close()
            raise
        self._bounce_idle.extend(self._bounce)

    def stage(self, staged: Staged) -> None:
        """Lend a block for an expert: its copy if there is one (`staged.hit`), otherwise memory to read it
        into.

        Waits while the same expert is being read by another fill, and for a bounce block. Raises
        `DeviceError` when the allocator fails. `leave` must follow, whatever happened.
        """
        with self._changed:
            while True:
                block = self._blocks.get(staged.key)
                if block is not None and block.state is BlockState.RESIDENT:
                    self._lend(staged, block, hit=True)
                    self._hits += 1
                    self._blocks.move_to_end(staged.key)
                    return
                if block is None:
                    block = self._make_block(self._device.allocation_bytes(staged.n_bytes))
                    if block is not None:
                        block.state, block.key = BlockState.FILLING, staged.key
                        self._blocks[staged.key] = block
                        self._lend(staged, block, hit=False)
                        break
                    if self._bounce_idle:
                        staged.bounce = True
                        self._lend(staged, self._bounce_idle[-1], hit=False)
                        self._bounce_idle.pop()
                        break
                self._changed.wait()
            self._misses += self._budget_bytes > 0

    def commit(self, staged: Staged) -> None:
        """Make the staged expert's block RESIDENT: all its bytes are there. A bounce block stays one."""
        with self._changed:
            assert staged.block is not None, "commit of what was not staged"
            assert not staged.hit, "commit of what was there already"
            if not staged.bounce:
                staged.block.state = BlockState.RESIDENT
                self._bytes_in += staged.expert_bytes
                self._changed.notify_all()

    def leave(self, staged: Staged) -> None:
        """Take the lent block back; one that was not committed becomes FREE. A second call does nothing."""
        with self._changed:
            block, staged.block = staged.block, None
            if block is None:
                return
            block.users -= 1
            if staged.bounce:
                self._bounce_idle.append(block)
            elif block.users == 0:
                self._in_use_bytes -= block.n_bytes
                if block.state is BlockState.FILLING:
                    self._take_off(block)
                    self._free.setdefault(block.n_bytes, []).append(block)
            self._changed.notify_all()

    def refresh(self, keys: Iterable[ExpertKey]) -> None:
        """Note that L1 evicted these experts: copies that exist become the youngest."""
        with self._changed:
            for key in keys:
                if key in self._blocks:
                    self._blocks.move_to_end(key)

    def stats(self) -> L2Stats:
        """Return sizes and counts as of now."""
        with self._changed:
            return L2Stats(
                budget_bytes=self._budget_bytes,
                used_bytes=self._used_bytes,
                peak_bytes=self._peak_bytes,
                bounce_bytes=sum(block.n_bytes for block in self._bounce),
                hits=self._hits,
                misses=self._misses,
                evictions=self._evictions,
                bytes_in=self._bytes_in,
            )

    def copies(self) -> list[tuple[ExpertKey, int]]:
        """Return (expert, address) of the RESIDENT blocks, oldest first."""
        with self._changed:
            return [
                (key, block.address)
                for key, block in self._blocks.items()
                if block.state is BlockState.RESIDENT
            ]

    def check_valid(self) -> None:
        """Assert the budget (I3), conservation (I4) and bijection (I5) of the blocks."""
        with self._changed:
            free = [block for blocks in self._free.values() for block in blocks]
            taken = list(self._blocks.values())
            assert self._used_bytes == sum(block.n_bytes for block in free + taken), (
                "blocks and used bytes differ"
            )
            assert self._used_bytes <= self._peak_bytes <= self._budget_bytes, (
                f"{self._used_bytes} bytes used, {self._peak_bytes} at most, of {self._budget_bytes}"
            )
            in_use = sum(block.n_bytes for block in taken if block.users)
            assert self._in_use_bytes == in_use, f"{self._in_use_bytes} bytes counted in use, {in_use} are"
            addresses = [block.address for block in free + taken + self._bounce]
            assert len(set(addresses)) == len(addresses), "a block is in two places"
            for size, blocks in self._free.items():
                for block in blocks:
                    assert block.n_bytes == size, f"a block of {block.n_bytes} bytes among those of {size}"
                    assert (block.state, block.key, block.users) == (BlockState.FREE, None, 0), block
            for key, block in self._blocks.items():
                assert block.key == key, block
                assert block.state is not BlockState.FREE, block
                assert block.state is BlockState.RESIDENT or block.users == 1, (
                    f"filled by {block.users}: {block}"
                )
            idle = {block.address for block in self._bounce_idle}
            assert len(idle) == len(self._bounce_idle), "a bounce block is idle twice"
            for block in self._bounce:
                assert block.users == (block.address not in idle), block

    def close(self) -> None:
        """Free all memory; no fill may be running. A second call does nothing."""
        with self._changed:
            blocks = [*self._blocks.values(), *self._bounce]
            blocks.extend(block for free in self._free.values() for block in free)
            assert not any(block.users for block in blocks), "close during a fill"
            self._blocks.clear()
            self._free.clear()
            self._bounce.clear()
            self._bounce_idle.clear()
            self._used_bytes = 0
            for block in blocks:
                self._device.free(block.address)

    # ---- with the lock held

    def _lend(self, staged: Staged, block: HostBlock, *, hit: bool) -> None:
        staged.block, staged.hit = block, hit
        block.users += 1
        if block.users == 1 and not staged.bounce:
            self._in_use_bytes += block.n_bytes

    def _make_block(self, n_bytes: int) -> HostBlock | None:
        """Return a FREE block of `n_bytes` that is in no list; None where the budget has no room for it."""
        if self._free.get(n_bytes):
            return self._free[n_bytes].pop()
        if self._in_use_bytes + n_bytes > self._budget_bytes:
            return None
        while self._used_bytes + n_bytes > self._budget_bytes:
            block = self._pop_free() or self._evict_oldest()
            if block.n_bytes == n_bytes:
                return block
            self._used_bytes -= block.n_bytes
            self._device.free(block.address)
        block = HostBlock(self._device.alloc_pinned(n_bytes), n_bytes)
        self._used_bytes += n_bytes
        self._peak_bytes = max(self._peak_bytes, self._used_bytes)
        return block

    def _pop_free(self) -> HostBlock | None:
        for blocks in self._free.values():
            if blocks:
                return blocks.pop()
        return None

    def _evict_oldest(self) -> HostBlock:
        block = next(block for block in self._blocks.values() if not block.users)
        assert block.state is BlockState.RESIDENT, block
        self._take_off(block)
        self._evictions += 1
        return block

    def _take_off(self, block: HostBlock) -> None:
        assert block.key is not None
        del self._blocks[block.key]
        block.key, block.state = None, BlockState.FREE
