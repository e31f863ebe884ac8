"""The host pool, L2: copies of experts in pinned host memory, within a budget.

A fill is the pair `begin_fill` / `end_fill`, with `complete_fill` between them when the bytes had to be read.
`acquire_copies` / `release_copies` is the pair for several complete copies at once. A block goes through these states:

           begin_fill (miss)          complete_fill
    FREE ────────────────────► FILLING ─────────────► RESIDENT ◄─┐
     ▲ ▲                          │                    │   └─────┘ begin_fill (hit), acquire_copies, touch:
     │ └─ end_fill, not complete ─┘                    │           it becomes the youngest in the order of use
     └──────── begin_fill for another expert ──────────┘
               (evicts the oldest that nobody uses)

1. Blocks are cut from chunks, one chunk an allocation, and all blocks of a chunk have one size. Within a size,
   the oldest block goes first. Where experts differ in size, each size has a quota: one below its own takes
   the coldest whole chunk of one above (`chunk_store.py`, `fair_share.py`).
2. What the allocator takes for chunks, FREE and FILLING blocks included, is reserved in `HostBudget` before it
   is allocated and released after it is freed (I3).
3. Memory is allocated and freed, and fences and other pools are waited for, with no lock held.
4. A block whose bytes a queued copy still reads is neither overwritten nor freed; it may be read (I10).
5. Where no block can be had for an expert (the pool is off, too small, or all of it is in use), the fill goes
   through one of two bounce blocks, which are allocated at the start, beside the budget, and keep nothing.
6. A refused allocation is an error of the fill that asked. It changes nothing, and the next fill works: after
   refusals in a row, with the memory that the pool has (`growth_pause.py`).

Order of use (the eviction order): an L2 hit and a fill are uses, and so is the expert's eviction from L1
(`touch`); an L1 hit is none.
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
"""After so many uses, and at every miss, the machine's memory is looked at, if that was not done just now."""


class HostPool:
    """Blocks of pinned host memory, one an expert copy, least recently used first out.

    Thread-safe: its lock is held for book-keeping only, never during a read, a copy, an allocation or a wait. The main
    thread begins and ends fills, and acquires and releases copies, in a region of `interrupts.py`.
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
        """Allocate the bounce blocks; `budget_bytes` of 0 switches the pool off.

        `largest_block_bytes` is the most that `begin_fill` will ask for. `experts_by_size` says how many experts
        there are of each size in bytes; without it, those that fills have asked for so far count. `budget` is the
        process's unless another is given; `directory` is kept up to date with the copies; pools of one `model` on
        several devices claim together. Raises `DeviceError`.
        """
        self._budget = budget if budget is not None else process_budget()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._directory = directory
        self._store = ChunkStore(
            device, self._budget, self._changed, budget_bytes, experts_by_size, clock, directory, model
        )
        self._blocks = self._store.blocks
        self._fenced: deque[HostBlock] = deque()  # in the order of their fences, to forget these when done
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

        Waits while the same expert is being read by another fill, for queued copies, and for a bounce block.
        Raises `DeviceError` when the allocator fails. `end_fill` must follow, whatever happened.
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
        """Give the handle a block to read an expert into that nobody waits for, where that takes nothing from anyone.

        No copy is evicted, no other pool or size of experts loses what is its due, and no memory is taken while the
        machine is short of it. The copy will be the first to go. Raises `DeviceError` when the allocator fails.
        `end_fill` must follow, whatever happened.
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
        """Make the fill's block RESIDENT: all of the expert's bytes are there. A bounce block stays one."""
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
        """Take the block back from the handle; a fill that is not complete is aborted. A second call does nothing.

        `fence` is the end of a queued copy that still reads the block.
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
        """Add the complete copies of a layer's `experts` to `copies`; never waits. `release_copies` must follow."""
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
        """Let the blocks go; a second call does nothing. `fence` is the end of queued copies that still read them."""
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
        """Whether the pool may keep anything."""
        return self._store.budget_bytes > 0

    @property
    def n_lost(self) -> int:
        """How many copies have left the pool so far, however they did."""
        return self._store.evictions

    def touch(self, keys: Iterable[ExpertKey]) -> None:
        """Note that L1 evicted these experts: copies that exist become the youngest."""
        with self._lock:
            for key in keys:
                block = self._blocks.get(key)
                if block is not None:
                    self._store.use(block)

    def contains(self, key: ExpertKey) -> bool:
        """Whether a complete copy of the expert is there now; this is no use of it."""
        block = self._blocks.get(key)
        return block is not None and block.state is BlockState.RESIDENT

    def copies(self) -> list[tuple[ExpertKey, int]]:
        """Return (expert, address) of the RESIDENT blocks, oldest first."""
        with self._lock:
            blocks = sorted(self._blocks.items(), key=lambda entry: entry[1].used_at)
            return [(key, block.address) for key, block in blocks if block.state is BlockState.RESIDENT]

    # ---- the pool

    def resize(self, budget_bytes: int) -> None:
        """Set the budget. The pool shrinks now as far as blocks in use allow, the rest when they are left."""
        self._store.resize(budget_bytes)

    def stats(self) -> L2Stats:
        """Return sizes and counts as of now."""
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
        """Assert the budget (I3), conservation (I4), bijection (I5) and the counts (I14) of the blocks."""
        self._budget.check_valid()
        with self._lock:
            self._store.check_valid()
            self._bounce.check_valid()
            resident = sum(block.state is BlockState.RESIDENT for block in self._blocks.values())
            assert self._fills - self._store.evictions == resident, (
                f"{self._fills} fills and {self._store.evictions} evictions leave {resident} copies"
            )

    def close(self) -> None:
        """Free all memory, once queued copies are done; no fill may run. A second call does nothing."""
        with self._lock:
            fences = [*self._store.fences(), *self._bounce.fences()]
        for fence in fences:
            fence.wait()
        for block in self._fenced:  # blocks and chunks know each other: their events would outlive the device
            block.fences = ()
        self._fenced.clear()
        self._bounce.close()
        self._store.close()

    # ---- with the lock held

    def _place(self, handle: FillHandle, tries: int) -> Step | None:
        """Give the handle a block if there is one now; otherwise return what to do before looking again, or wait."""
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
        """Wait for a block that a queued copy reads, take a bounce block, or wait for either."""
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
        """Forget fences that are done, up to one more than come in, so that their events are used again."""
        with suppress(DeviceError):  # an error of whoever needs the block, not of the fill that ends
            while most and self._fenced and self._fenced[0].is_quiet():
                self._fenced.popleft()
                most -= 1
