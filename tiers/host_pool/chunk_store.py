"""The host pool's memory: chunks that the allocator gave, grouped by the size of their blocks."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import pairwise
from typing import TypeAlias

from expertier.errors import DeviceError
from expertier.hip.device import Device
from expertier.hip.fence import Fence
from expertier.tiers.host_pool.block import BlockState, ExpertKey, HostBlock, HostChunk
from expertier.tiers.host_pool.budget import HostBudget
from expertier.tiers.host_pool.chunk_size import block_size, blocks_per_chunk
from expertier.tiers.host_pool.copy_directory import CopyDirectory
from expertier.tiers.host_pool.fair_share import class_quotas
from expertier.tiers.host_pool.growth_pause import GrowthPause
from expertier.tiers.host_pool.size_class import SizeClass

Step: TypeAlias = Callable[[], object]
"""What the caller has to do, after it has released the lock, before it asks again."""

_ROOM_TRIES = 3  # steps after which a fill makes no more room, since other fills keep taking what it makes


class ChunkStore:
    """Takes chunks from the allocator within the budget, and gives the coldest chunks back.

    `changed` is the pool's condition. Its lock must be held when a method is called, with the exception of methods that
    allocate, free or wait: `resize`, `give_back`, `close`, and the steps that `plan_growth` and `plan_free_growth`
    return.
    """

    def __init__(
        self,
        device: Device,
        budget: HostBudget,
        changed: threading.Condition,
        budget_bytes: int,
        experts_by_size: Mapping[int, int] | None,
        clock: Callable[[], float] = time.monotonic,
        directory: CopyDirectory | None = None,
        model: object = None,
    ) -> None:
        """Start without chunks; the arguments are those of `HostPool`."""
        self._directory = directory
        self._device = device
        self._budget = budget
        self._changed = changed
        self._seen: set[ExpertKey] | None = set() if experts_by_size is None else None
        self._n_experts: Counter[int] = Counter()
        for n_bytes, count in (experts_by_size or {}).items():
            self._n_experts[block_size(n_bytes)] += count
        self._n_chunks = 0
        self._moving_bytes = 0  # reserved bytes in no chunk: a thread is allocating or freeing them
        self._allowed_bytes = budget_bytes  # the budget, or more while the pool shrinks to a lowered budget
        self._pause = GrowthPause(clock)
        self._quotas: dict[int, int] = {}
        self._quotas_for: tuple[int, int, int] | None = None
        self.budget_bytes = budget_bytes
        self.blocks: dict[ExpertKey, HostBlock] = {}
        """The blocks that are not FREE."""
        self.classes: dict[int, SizeClass] = {}
        self.uses = self.evictions = self.given_back_bytes = 0
        self._n_unused = 0
        self.account = budget.open(self, self._claim(budget_bytes), model)

    # ---- blocks, with the lock held

    def class_of(self, key: ExpertKey, n_bytes: int) -> SizeClass:
        """Return the size class for the expert `key` of `n_bytes`; make the class where there is none yet."""
        block_bytes = block_size(n_bytes)
        size = self.classes.get(block_bytes)
        if size is None:
            size = SizeClass(block_bytes, self._device.pinned_allocation_bytes(block_bytes))
            self.classes[block_bytes] = size
        size.content_bytes = max(size.content_bytes, n_bytes)
        if self._seen is not None and key not in self._seen:
            self._seen.add(key)
            self._n_experts[block_bytes] += 1
        return size

    def put_on(self, block: HostBlock, key: ExpertKey) -> None:
        """Give a block that is in no list to an expert, as FILLING."""
        self.classes[block.chunk.block_bytes].put_on(block, key)
        self.blocks[key] = block

    def use(self, block: HostBlock) -> None:
        """Make a block that is not FREE the most recently used one."""
        assert block.key is not None, block.state
        self.uses += 1
        block.used_at = self.uses
        self.classes[block.chunk.block_bytes].order.move_to_end(block.key)

    def put_first(self, block: HostBlock) -> None:
        """Make a block that was filled ahead of any use the first to be evicted."""
        assert block.key is not None, block.state
        self._n_unused += 1
        block.used_at = -self._n_unused
        self.classes[block.chunk.block_bytes].order.move_to_end(block.key, last=False)

    def abort_fill(self, block: HostBlock) -> None:
        """Make a FILLING block FREE, because its fill failed."""
        self._take_off(block)
        self.classes[block.chunk.block_bytes].free[block] = None

    def publish(self, block: HostBlock) -> None:
        """Enter a copy that has just become RESIDENT in the directory, where C++ finds it."""
        if self._directory is not None:
            assert block.key is not None, block.state
            self._directory.publish(block.key, block.address)

    def take_oldest(self, size: SizeClass) -> HostBlock | None:
        """Evict the least recently used copy that nothing reads, and return its block, which is then in no list.

        Returns None where every block of the class is in use.
        """
        directory = self._directory
        while (block := size.oldest(directory.is_read if directory is not None else None)) is not None:
            key = block.key
            assert key is not None, block.state
            if directory is not None:
                if directory.take_used(key):
                    self.use(block)
                    continue
                if not directory.retract([key]):
                    continue  # the engine has just begun to read it
            self._take_off(block)
            self.evictions += 1
            return block
        return None

    # ---- chunks, with the lock held

    def plan_growth(self, size: SizeClass, tries: int) -> Step | None:
        """Return the next step towards another chunk for a class; None where the budget does not allow one.

        `tries` counts the steps that this fill has done already. After the first step the class takes no more than its
        quota, but at least one block: the free room may be what other pools or classes have just given up for it.
        """
        if self.account.claim_bytes < size.unit_bytes or self._pause.is_on():
            return None
        room = self._budget.room(self.account)
        if room < size.unit_bytes and tries < _ROOM_TRIES:
            missing = size.unit_bytes - room
            if self._budget.others_have(self.account, size.unit_bytes):
                return partial(self._budget.make_room, self.account, missing)
            if chunks := self._surplus(size, missing):
                return partial(self._free, self._remove(chunks))
        if room < size.unit_bytes:
            return None
        if tries:
            due = min(self._due(size), self._budget.share(self.account) - self.account.used_bytes)
            room = min(room, max(due, size.unit_bytes))
        return self._plan_chunk(size, room)

    def plan_free_growth(self, size: SizeClass) -> Step | None:
        """Return the step that allocates another chunk where the class is below its quota and there is free room.

        Returns None where that is not so, and also while the machine is short of memory. No other pool or class loses
        memory by it.
        """
        if self.account.claim_bytes < size.unit_bytes or self._pause.is_on() or self._budget.is_short:
            return None
        due = min(self._due(size), self._budget.share(self.account) - self.account.used_bytes)
        room = min(self._budget.room(self.account), due)
        return self._plan_chunk(size, room) if room >= size.unit_bytes else None

    def _plan_chunk(self, size: SizeClass, room: int) -> Step | None:
        """Reserve the bytes of a chunk, at most `room`, and return the step that allocates it; None: no room."""
        n_blocks = blocks_per_chunk(
            size.block_bytes,
            self._device.pinned_allocation_bytes,
            pool_bytes=min(self.account.claim_bytes, self._budget.limit_bytes),
            room_bytes=room,
            most_blocks=None if self._seen is not None else self._n_experts[size.block_bytes] - size.n_blocks,
        )
        n_bytes = self._device.pinned_allocation_bytes(n_blocks * size.block_bytes) if n_blocks else 0
        if not n_blocks or not self._budget.reserve(self.account, n_bytes):
            return None
        size.growing = True
        self._moving_bytes += n_bytes
        return partial(self._grow, size, n_blocks, n_bytes)

    def _due(self, size: SizeClass) -> int:
        """Return by how many bytes a class is below its quota; negative where it is above."""
        return self._class_quotas()[size.block_bytes] - size.taken_bytes

    def _surplus(self, size: SizeClass, n_bytes: int) -> list[HostChunk]:
        """Return the coldest chunks of classes above their quotas, of `n_bytes` in all, for a class below its quota.

        Returns an empty list where these chunks have fewer bytes. For a class that has no memory yet, other classes may
        go below their quotas by less than a chunk, because a chunk may be larger than what a class has in excess.
        """
        if len(self.classes) == 1 or self._due(size) < size.unit_bytes:
            return []
        quotas = self._class_quotas()
        taken = {name: other.taken_bytes for name, other in self.classes.items() if other is not size}

        def is_surplus(chunk: HostChunk) -> bool:
            name = chunk.block_bytes
            floor = quotas[name] if size.taken_bytes else quotas[name] - chunk.n_bytes + 1
            return name in taken and taken[name] - chunk.n_bytes >= floor

        chosen: list[HostChunk] = []
        for chunk in self._coldest(is_surplus):
            if is_surplus(chunk) and chunk.is_idle():  # asked again: the chunks chosen so far lower `taken`
                taken[chunk.block_bytes] -= chunk.n_bytes
                chosen.append(chunk)
                n_bytes -= chunk.n_bytes
                if n_bytes <= 0:
                    return chosen
        return []

    def _coldest(self, which: Callable[[HostChunk], bool] = lambda _: True) -> list[HostChunk]:
        """Return the chunks for which `which` is true, the coldest first."""
        chunks = [chunk for size in self.classes.values() for chunk in size.chunks.values() if which(chunk)]
        return sorted(chunks, key=lambda chunk: chunk.coldness)

    def _class_quotas(self) -> dict[int, int]:
        limit = self._budget.share(self.account)
        version = (limit, len(self.classes), self._n_experts.total())
        if version != self._quotas_for:
            units = {name: size.unit_bytes for name, size in self.classes.items()}
            self._quotas = class_quotas(limit, units, self._n_experts)
            self._quotas_for = version
        return self._quotas

    def _remove(self, chunks: Iterable[HostChunk]) -> list[HostChunk]:
        """Take idle chunks out of their classes and evict their copies; return the removed chunks, for `_free`.

        A chunk stays, and is not returned, where the engine has just begun to read a copy in it.
        """
        removed = []
        for chunk in chunks:
            keys = [block.key for block in chunk.blocks if block.key is not None]
            if self._directory is not None and keys and not self._directory.retract(keys):
                continue
            lost = self.classes[chunk.block_bytes].remove(chunk)
            for key in lost:
                del self.blocks[key]
            self.evictions += len(lost)
            self._moving_bytes += chunk.n_bytes
            removed.append(chunk)
        return removed

    def _take_off(self, block: HostBlock) -> None:
        assert block.key is not None, block.state
        del self.blocks[block.key]
        self.classes[block.chunk.block_bytes].take_off(block)

    # ---- with the lock released

    def resize(self, budget_bytes: int) -> None:
        """Set the budget, and shrink the pool to it; chunks with blocks in use stay."""
        with self._changed:
            self._allowed_bytes = max(budget_bytes, self.account.used_bytes)
            self.budget_bytes = budget_bytes
        self._budget.set_claim(self.account, self._claim(budget_bytes))

    def give_back(self, n_bytes: int, keep_bytes: int, *, crossing: bool) -> int:
        """Free about `n_bytes`, the coldest chunks first, and return how many were freed; see `GivesBack`."""
        with self._changed:
            chunks: list[HostChunk] = []
            left, freed = self.account.used_bytes - self._moving_bytes, 0
            for chunk in self._coldest():
                if freed >= n_bytes or left <= keep_bytes:
                    break
                if (crossing or left - chunk.n_bytes >= keep_bytes) and chunk.is_idle():
                    chunks.append(chunk)
                    left -= chunk.n_bytes
                    freed += chunk.n_bytes
            chunks = self._remove(chunks)
            freed = sum(chunk.n_bytes for chunk in chunks)
            self.given_back_bytes += freed
        self._free(chunks)
        return freed

    def _grow(self, size: SizeClass, n_blocks: int, n_bytes: int) -> None:
        """Allocate a chunk whose `n_bytes` are reserved already.

        Raises `DeviceError` where the allocator refuses; the reservation is then undone.
        """
        try:
            address = self._device.alloc_pinned(n_blocks * size.block_bytes)
        except BaseException as error:
            with self._changed:
                if isinstance(error, DeviceError):
                    self._pause.refused()
                self._end_move(n_bytes)
                self._budget.release(self.account, n_bytes)
                size.growing = False
            raise
        with self._changed:
            self._pause.granted()
            self._n_chunks += 1
            size.add(HostChunk.cut(self._n_chunks, address, n_bytes, size.block_bytes, n_blocks))
            self._end_move(n_bytes)
            size.growing = False

    def _free(self, chunks: Iterable[HostChunk]) -> None:
        """Free chunks that were removed from their classes."""
        for chunk in chunks:
            self._device.free(chunk.address)
            with self._changed:
                self._end_move(chunk.n_bytes)
                self._budget.release(self.account, chunk.n_bytes)
                self._allowed_bytes = max(self.budget_bytes, self.account.used_bytes)

    def _end_move(self, n_bytes: int) -> None:
        self._moving_bytes -= n_bytes
        self._changed.notify_all()

    def _claim(self, budget_bytes: int) -> int:
        """Return the most bytes that the pool can use: the budget, or less where copies of all experts take less."""
        if self._seen is not None:
            return budget_bytes
        units = self._device.pinned_allocation_bytes
        return min(budget_bytes, sum(units(size) * count for size, count in self._n_experts.items()))

    # ---- for the pool's stats, checks and end

    @property
    def refusals(self) -> int:
        """How often the allocator has refused."""
        return self._pause.refusals

    @property
    def rounding_bytes(self) -> int:
        """The bytes of the chunks that can hold no expert bytes, because of rounding."""
        return sum(size.taken_bytes - size.content_bytes * size.n_blocks for size in self.classes.values())

    def fences(self) -> list[Fence]:
        """Return the fences of all queued copies that read blocks."""
        chunks = self._coldest()
        return [fence for chunk in chunks for block in chunk.blocks for fence in block.fences]

    def check_valid(self) -> None:
        """Assert the budget (I3), that every block is in one state (I4), and that keys and blocks match (I5)."""
        sizes = self.classes.values()
        used = self.account.used_bytes
        taken = sum(size.taken_bytes for size in sizes)
        assert used == taken + self._moving_bytes, f"{used} bytes counted, {taken} in chunks"
        assert used <= self.account.peak_bytes, f"{used} bytes used, {self.account.peak_bytes} at most"
        assert used <= self._allowed_bytes, f"{used} bytes used of {self._allowed_bytes}"
        for size in sizes:
            size.check_valid()
        listed = {key: block for size in sizes for key, block in size.order.items()}
        assert listed == self.blocks, "the classes and the pool list other blocks"
        if self._directory is not None:
            resident = {key: b.address for key, b in listed.items() if b.state is BlockState.RESIDENT}
            found = {key: self._directory.address_of(key) for key in resident}
            assert found == resident, f"published are {found}, resident {resident}"
            assert self._directory.n_published() == len(resident), "a copy is published that is not there"
        chunks = sorted(self._coldest(), key=lambda chunk: chunk.address)
        for chunk, after in pairwise(chunks):
            # Only the blocks are compared: the allocator may count a small chunk as its share of a larger piece.
            end = chunk.address + len(chunk.blocks) * chunk.block_bytes
            assert end <= after.address, f"chunks overlap at {after.address:#x}"

    def close(self) -> None:
        """Free all chunks; no fill and no queued copy may use one. A second call does nothing."""
        with self._changed:
            chunks = self._coldest()
            assert not any(chunk.n_in_use for chunk in chunks), "close during a fill"
            assert not any(size.growing for size in self.classes.values()), "close during a fill"
            assert self._remove(chunks) == chunks, "close while an engine reads copies"
            self.classes.clear()
        self._free(chunks)
        self._budget.close(self.account)
