"""The host pool, L2: copies of experts in pinned host memory, within a budget.

A fill is the pair `begin_fill` / `end_fill`, with `complete_fill` between them when the bytes had to be read.
`acquire_copies` / `release_copies` is the pair for several complete copies at once. A block goes through these states:

           begin_fill (miss)          complete_fill
    FREE ────────────────────► FILLING ─────────────► RESIDENT ◄─┐
     ▲ ▲                          │                    │   └─────┘ begin_fill (hit), acquire_copies, touch:
     │ └─ end_fill, not complete ─┘                    │           it becomes the youngest in the order of use
     └──────── begin_fill for another expert ──────────┘
               (evicts the least recently used block that nothing uses)

1. Blocks are cut from chunks. Each chunk is one allocation, and all its blocks have the same size. Within a size the
   least recently used block is evicted first. Where experts differ in size, each size has a quota: a size below its
   quota takes the coldest whole chunk of a size above its own (`chunk_store.py`, `fair_share.py`).
2. The bytes of chunks, with their FREE and FILLING blocks, are reserved in `HostBudget` before they are allocated and
   released after they are freed (I3).
3. No lock is held while memory is allocated or freed, nor while a thread waits for fences or other pools.
4. A block that a queued copy still reads is neither overwritten nor freed; it may be read (I10).
5. Where there is no block for an expert, because the pool is off, too small or wholly in use, the fill goes through one
   of two bounce blocks. These are allocated at the start, beside the budget, and keep no copies.
6. A refused allocation is an error of the fill that asked. It changes nothing, and the next fill works; after several
   refusals in a row, fills use the memory that the pool has (`growth_pause.py`).

The order of use decides what is evicted. An L2 hit, a fill, and the expert's eviction from L1 (`touch`) count as uses;
an L1 hit does not.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

from expertier.errors import DeviceError
from expertier.hip.device import Device
from expertier.hip.fence import Fence
from expertier.interrupts import wait_interruptibly
from expertier.tiers.host_pool.acquired_copies import AcquiredCopies
from expertier.tiers.host_pool.block import BlockState, ExpertKey, HostBlock
from expertier.tiers.host_pool.bounce_blocks import N_BOUNCE_BLOCKS, BounceBlocks
from expertier.tiers.host_pool.budget import HostBudget, process_budget
from expertier.tiers.host_pool.chunk_size import block_size
from expertier.tiers.host_pool.chunk_store import ChunkStore, Step
from expertier.tiers.host_pool.copy_directory import CopyDirectory
from expertier.tiers.host_pool.fill_handle import FillHandle, FreeRoom
from expertier.tiers.host_pool.size_class import SizeClass
from expertier.tiers.shared.stats import L2Stats

__all__ = ["N_BOUNCE_BLOCKS", "HostPool"]

USES_PER_LOOK = 128
"""The machine's memory is looked at after so many uses, and at every miss, but at most once a second."""


class HostPool:
    """Copies of experts in blocks of pinned host memory; the least recently used copy is evicted first.

    Thread-safe: its lock is held for book-keeping only, never during a read, a copy, an allocation or a wait. The main
    thread must be in a region of `interrupts.py` when it begins or ends fills, and when it acquires or releases copies.
    """

    def __init__(
        self,
        device: Device,
        *,
        budget_bytes: int,
        largest_block_bytes: int,
        experts_by_size: Mapping[int, int] | None = None,
        budget: HostBudget | None = None,
        clock: Callable[[], float] = time.monotonic,
        directory: CopyDirectory | None = None,
        model: object = None,
    ) -> None:
        """Allocate the bounce blocks; a `budget_bytes` of 0 switches the pool off.

        `largest_block_bytes` is the largest `n_bytes` of any fill. `experts_by_size` maps a size in bytes to the number
        of experts of that size; without it, only experts that fills have asked for are counted. `budget` is by default
        the one of the process. `directory`, if given, is kept up to date with the copies. Where a model lies on several
        devices, its pools are given the same `model`, and the budget adds their claims. Raises `DeviceError`.
        """
        self._budget = budget if budget is not None else process_budget()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._directory = directory
        self._store = ChunkStore(
            device, self._budget, self._changed, budget_bytes, experts_by_size, clock, directory, model
        )
        self._blocks = self._store.blocks
        self._fenced: deque[HostBlock] = deque()  # blocks with fences, oldest fence first, to drop those done
        self._hits = self._misses = self._fills = self._bytes_in = 0
        self._ahead_fills = self._ahead_bytes = 0
        try:
            block_bytes = block_size(largest_block_bytes)
            self._bounce = BounceBlocks(device, self._budget, self._store.account, block_bytes)
        except BaseException:
            self._store.close()
            raise

    # ---- one fill

    def begin_fill(self, handle: FillHandle) -> None:
        """Give the handle a block: the expert's copy if there is one (`handle.hit`), otherwise memory to read it into.

        It waits where another fill reads the same expert, and where fills or queued copies use all blocks and bounce
        blocks. Raises `DeviceError` where the allocator fails. The caller must call `end_fill` afterwards, even where
        this raised.
        """
        with self._lock:
            block = self._blocks.get(handle.key)
            if block is not None and block.state is BlockState.RESIDENT:
                self._use_copy(handle, block)
                if self._store.uses % USES_PER_LOOK:
                    return
        self._budget.relieve()
        tries = 0
        while handle.block is None:
            with self._lock:
                step = self._place(handle, tries)
            if step is not None:
                step()
                tries += 1

    def begin_fill_ahead(self, handle: FillHandle) -> FreeRoom:
        """Give the handle a block to read an expert into ahead of demand, but only out of free room.

        No copy is evicted, no other pool or size of experts loses memory of its share or quota, and no memory is
        allocated while the machine is short of it. The new copy is the first to be evicted. Raises `DeviceError` where
        the allocator fails. The caller must call `end_fill` afterwards, even where this raised.
        """
        self._budget.relieve()
        while True:
            with self._lock:
                if handle.key in self._blocks:
                    return FreeRoom.PRESENT
                size = self._store.class_of(handle.key, handle.n_bytes)
                block = size.take_free()
                if block is not None:
                    self._store.put_on(block, handle.key)
                    self._store.put_first(block)
                    handle.ahead = True
                    self._use_block(handle, block)
                    return FreeRoom.BEGUN
                if size.growing:
                    wait_interruptibly(self._changed)
                    continue
                step = self._store.plan_free_growth(size)
            if step is None:
                return FreeRoom.NONE
            step()

    def complete_fill(self, handle: FillHandle) -> None:
        """Make the fill's block RESIDENT, because it holds all of the expert's bytes; a bounce block has no state."""
        with self._lock:
            assert handle.block is not None, "complete_fill before begin_fill"
            assert not handle.hit, "complete_fill of a hit"
            if not handle.bounce:
                handle.block.state = BlockState.RESIDENT
                self._store.publish(handle.block)
                self._bytes_in += handle.expert_bytes
                self._fills += 1
                if handle.ahead:
                    self._ahead_fills += 1
                    self._ahead_bytes += handle.expert_bytes
                self._changed.notify_all()

    def end_fill(self, handle: FillHandle, fence: Fence | None = None) -> None:
        """Take the block back from the handle, and abort the fill where it is not complete. A second call does nothing.

        `fence` marks the end of a queued copy that still reads the block.
        """
        with self._lock:
            block, handle.block = handle.block, None
            if block is None:
                return
            self._forget_fences(2)
            self._end_use(block, fence)
            if block.users == 0:
                if handle.bounce:
                    self._bounce.put_back(block)
                elif block.state is BlockState.FILLING:
                    self._store.abort_fill(block)
            self._changed.notify_all()
        if self._budget.is_over:
            self._budget.shrink_pools()

    # ---- several copies at once

    def acquire_copies(self, copies: AcquiredCopies, layer: int, experts: Sequence[int]) -> None:
        """Add the RESIDENT copies of a layer's `experts` to `copies`, without waiting for any.

        The caller must call `release_copies` afterwards.
        """
        with self._lock:
            looks = self._store.uses // USES_PER_LOOK
            for index, expert in enumerate(experts):
                block = self._blocks.get((layer, expert))
                if block is not None and block.state is BlockState.RESIDENT:
                    self._store.use(block)
                    copies.indices.append(index)
                    copies.blocks.append(block)
                    self._begin_use(block)
            self._hits += len(copies.blocks)
            is_due = self._store.uses // USES_PER_LOOK > looks
        if is_due:
            self._budget.relieve()

    def release_copies(self, copies: AcquiredCopies, fence: Fence | None = None) -> None:
        """Give up the blocks in `copies`; a second call does nothing.

        `fence` marks the end of queued copies that still read the blocks.
        """
        with self._lock:
            blocks, copies.blocks = copies.blocks, []
            self._forget_fences(len(blocks) + 1)
            for block in blocks:
                self._end_use(block, fence)
            self._changed.notify_all()
        if self._budget.is_over:
            self._budget.shrink_pools()

    # ---- the order of use

    @property
    def is_on(self) -> bool:
        """Whether the pool may keep copies: its budget is above 0."""
        return self._store.budget_bytes > 0

    @property
    def n_lost(self) -> int:
        """How many copies have left the pool so far, for whatever reason."""
        return self._store.evictions

    def touch(self, keys: Iterable[ExpertKey]) -> None:
        """Note that L1 evicted these experts: their copies, where there are any, become the most recently used."""
        with self._lock:
            for key in keys:
                block = self._blocks.get(key)
                if block is not None:
                    self._store.use(block)

    def contains(self, key: ExpertKey) -> bool:
        """Whether the pool has a complete copy of the expert now; asking does not count as a use."""
        block = self._blocks.get(key)
        return block is not None and block.state is BlockState.RESIDENT

    def copies(self) -> list[tuple[ExpertKey, int]]:
        """Return (key, address) of the RESIDENT blocks, the least recently used first."""
        with self._lock:
            blocks = sorted(self._blocks.items(), key=lambda entry: entry[1].used_at)
            return [(key, block.address) for key, block in blocks if block.state is BlockState.RESIDENT]

    # ---- the pool

    def resize(self, budget_bytes: int) -> None:
        """Set the budget. The pool shrinks at once; chunks with blocks in use go when their use ends."""
        self._store.resize(budget_bytes)

    def stats(self) -> L2Stats:
        """Return the sizes now and the counts so far."""
        with self._lock:
            store = self._store
            return L2Stats(
                budget_bytes=store.budget_bytes,
                used_bytes=store.account.used_bytes,
                peak_bytes=store.account.peak_bytes,
                bounce_bytes=store.account.bounce_bytes,
                rounding_bytes=store.rounding_bytes,
                hits=self._hits + (self._directory.hits if self._directory is not None else 0),
                misses=self._misses,
                evictions=store.evictions,
                bytes_in=self._bytes_in,
                ahead_fills=self._ahead_fills,
                ahead_bytes=self._ahead_bytes,
                refusals=store.refusals,
                given_back_bytes=store.given_back_bytes,
            )

    def check_valid(self) -> None:
        """Assert the budget (I3), the states of blocks (I4), that keys and blocks match (I5), and the counts (I14)."""
        self._budget.check_valid()
        with self._lock:
            self._store.check_valid()
            self._bounce.check_valid()
            resident = sum(block.state is BlockState.RESIDENT for block in self._blocks.values())
            assert self._fills - self._store.evictions == resident, (
                f"{self._fills} fills and {self._store.evictions} evictions leave {resident} copies"
            )

    def close(self) -> None:
        """Wait for queued copies, then free all memory. No fill may be running. A second call does nothing."""
        with self._lock:
            fences = [*self._store.fences(), *self._bounce.fences()]
        for fence in fences:
            fence.wait()
        for block in self._fenced:  # blocks and chunks form cycles: their events could outlive the device
            block.fences = ()
        self._fenced.clear()
        self._bounce.close()
        self._store.close()

    # ---- with the lock held

    def _place(self, handle: FillHandle, tries: int) -> Step | None:
        """Give the handle a block where there is one; otherwise wait, or return a step to do before the next call."""
        block = self._blocks.get(handle.key)
        if block is not None:
            if block.state is BlockState.RESIDENT:
                self._use_copy(handle, block)
            else:
                wait_interruptibly(self._changed)
            return None
        size = self._store.class_of(handle.key, handle.n_bytes)
        block = size.take_free()
        if block is None:
            if size.growing:
                wait_interruptibly(self._changed)
                return None
            step = self._store.plan_growth(size, tries)
            if step is not None:
                return step
            block = self._store.take_oldest(size)
        if block is not None:
            self._store.put_on(block, handle.key)
            self._store.use(block)
            self._use_block(handle, block)
            self._misses += 1
            return None
        return self._place_elsewhere(handle, size)

    def _place_elsewhere(self, handle: FillHandle, size: SizeClass) -> Step | None:
        """Return a step that waits for a queued copy; or give the handle a bounce block, or wait for any change."""
        awaited = size.awaited()
        if awaited is None:
            block = self._bounce.idle()
            if block is not None:
                handle.bounce = True
                self._bounce.take(block)
                self._use_block(handle, block)
                self._misses += self._store.budget_bytes > 0
                return None
            awaited = self._bounce.awaited()
        if awaited is not None:
            return awaited.fences[0].wait
        wait_interruptibly(self._changed)
        return None

    def _use_copy(self, handle: FillHandle, block: HostBlock) -> None:
        self._store.use(block)
        handle.hit = True
        self._use_block(handle, block)
        self._hits += 1

    def _use_block(self, handle: FillHandle, block: HostBlock) -> None:
        handle.block = block
        self._begin_use(block)

    @staticmethod
    def _begin_use(block: HostBlock) -> None:
        block.users += 1
        if block.users == 1:
            block.chunk.n_in_use += 1

    def _end_use(self, block: HostBlock, fence: Fence | None) -> None:
        if fence is not None:
            block.fences = (*block.fences, fence)
            self._fenced.append(block)
        block.users -= 1
        if block.users == 0:
            block.chunk.n_in_use -= 1

    def _forget_fences(self, most: int) -> None:
        """Drop fences that are done, at most those of `most` blocks, so that their events can be reused."""
        with suppress(DeviceError):  # the next fill that needs the block raises it, not the one that ends
            while most and self._fenced and self._fenced[0].is_quiet():
                self._fenced.popleft()
                most -= 1
