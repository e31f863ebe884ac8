"""Serves misses: brings an expert's bytes from host memory or the file into its slot.

        ┌─ L2 has a copy ──────────────────────────────────────► copy
miss ───┼─ L2 has a block for one ─► read into the block ──────► copy
        ├─ L2 has no block for it ─► read into a bounce block ─► copy
        └─ L2 is off, and slots are host memory ─► read into the slot
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import partial

from expertier.hip.device import Moves
from expertier.hip.fence import Fence
from expertier.tiers.file.byte_source import HintedSource
from expertier.tiers.fill.demand_reads import DemandReads
from expertier.tiers.fill.workers import FillWorkers, Task
from expertier.tiers.host_pool.acquired_copies import AcquiredCopies
from expertier.tiers.host_pool.fill_handle import FillHandle, FreeRoom
from expertier.tiers.host_pool.pool import HostPool
from expertier.tiers.model.layer import ExpertLayer
from expertier.tiers.model.slot_layout import SlotLayout
from expertier.tiers.model.span import Span
from expertier.tiers.slots.transfer import Transfer

READ_APART_BYTES = 2 << 20
"""Several threads read the matrices of an expert of at least this many bytes, as one thread leaves a disk half idle."""

BATCH_BYTES = 1 << 20
"""Where slots are host memory, a thread copies experts of about this many bytes at a time.

Smaller batches would be copied by the calling thread before another thread has started.
"""


class Filler:
    """Fills slots, several at a time.

    Thread-safe; no layer's lock may be held in a call. Where a call raises, the bytes of its slots are undefined, and
    the host pool is as if the expert that failed had not been asked for.
    """

    def __init__(
        self,
        layers: Sequence[ExpertLayer],
        layouts: Sequence[SlotLayout],
        pool: HostPool,
        source: HintedSource,
        transfer: Transfer,
        workers: FillWorkers,
        demand: DemandReads,
        *,
        slots_are_host_memory: bool,
    ) -> None:
        """Connect the parts; nothing is read yet. `demand` will count the calls of `fill` and `load`."""
        self._layers = layers
        self._expert_bytes = [layer.expert_bytes for layer in layers]
        self._layouts = layouts
        self._pool = pool
        self._source = source
        self._transfer = transfer
        self._workers = workers
        self._demand = demand
        self._slots_are_host_memory = slots_are_host_memory

    def fill(self, layer: int, experts: Sequence[int], slots: Sequence[int]) -> None:
        """Fill `slots[i]` with `experts[i]`, several slots at a time.

        Experts that L2 has are copied in batches, while other threads read those that it does not have. On a device
        with streams the copies may still be queued when this returns (`SlotFences`).
        """
        with self._demand:
            present, missing = self._sort(layer, experts)
            tasks: list[Task] = [
                partial(self._fill_present, layer, [experts[i] for i in batch], [slots[i] for i in batch])
                for batch in self._batches(layer, present)
            ]
            tasks += [partial(self.fill_one, layer, experts[i], slots[i]) for i in missing]
            self._workers.run(tasks)

    def fill_one(self, layer: int, expert: int, slot: int, *, prefetch: bool = False) -> None:
        """Fill one slot, on this thread. With `prefetch` the copy is queued on the stream for prefetches."""
        places = self._transfer.addresses(layer, slot) if self._slots_are_host_memory else None
        if places is not None and not self._pool.is_on:
            self._read(layer, expert, places)
            return
        handle = self._new_handle(layer, expert)
        fence: Fence | None = None
        try:
            self._ensure_copy(handle, places)
            if handle.hit or places is None:
                fence = self._transfer.into_slots(layer, [slot], [handle.address], prefetch=prefetch)
        finally:
            self._pool.end_fill(handle, fence)

    def load(self, layer: int, experts: Sequence[int], address: int) -> None:
        """Copy experts to device memory outside the slots; the bytes are there when this returns.

        The memory at `address` is laid out as a range with a slot for every expert of the layer, and expert `e` goes
        into slot `e` of it.
        """
        with self._demand:
            present, missing = self._sort(layer, experts)
            tasks: list[Task] = [
                partial(self._load_present, layer, [experts[i] for i in batch], address)
                for batch in self._batches(layer, present)
            ]
            tasks += [partial(self._load_one, layer, experts[i], address) for i in missing]
            self._workers.run(tasks)

    def fill_host_copy(self, layer: int, expert: int) -> None:
        """Bring an expert into the host pool only; a copy may be evicted for it."""
        handle = self._new_handle(layer, expert)
        try:
            self._ensure_copy(handle)
        finally:
            self._pool.end_fill(handle)

    def fill_host_copy_ahead(self, layer: int, expert: int) -> FreeRoom:
        """Bring an expert into the host pool, where that has free room; no copy is evicted for it."""
        handle = self._new_handle(layer, expert)
        try:
            room = self._pool.begin_fill_ahead(handle)
            if room is FreeRoom.BEGUN:
                self._source.will_need(self._layers[layer].spans(expert))
                self._read_copy(handle)
        finally:
            self._pool.end_fill(handle)
        return room

    # ---- copies that L2 has

    def _sort(self, layer: int, experts: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the indices of the experts that L2 seems to have, and of those that have to be read."""
        present: list[int] = []
        missing: list[int] = []
        for index, expert in enumerate(experts):
            (present if self._pool.contains((layer, expert)) else missing).append(index)
        if missing and len(experts) > 1:
            self._hint(layer, [experts[index] for index in missing])
        return present, missing

    def _batches(self, layer: int, present: list[int]) -> list[list[int]]:
        """Divide the experts that L2 has into batches: one where copies are queued, several where threads copy."""
        n = len(present)
        if self._slots_are_host_memory:
            n = -(-BATCH_BYTES // self._expert_bytes[layer])
        return [present[i : i + n] for i in range(0, len(present), n or 1)]

    def _fill_present(self, layer: int, experts: Sequence[int], slots: Sequence[int]) -> None:
        """Fill slots from L2's copies together, and then, one by one, those whose copies have left L2 meanwhile."""
        copies = AcquiredCopies()
        fence: Fence | None = None
        try:
            self._pool.acquire_copies(copies, layer, experts)
            if copies.blocks:
                into = [slots[index] for index in copies.indices]
                fence = self._transfer.into_slots(layer, into, copies.addresses)
        finally:
            self._pool.release_copies(copies, fence)
        for index in range(len(experts)) if len(copies.indices) < len(experts) else ():
            if index not in copies.indices:
                self.fill_one(layer, experts[index], slots[index])

    def _load_present(self, layer: int, experts: Sequence[int], address: int) -> None:
        """Load L2's copies together, and then, one by one, the experts whose copies have left L2 meanwhile."""
        copies = AcquiredCopies()
        try:
            self._pool.acquire_copies(copies, layer, experts)
            if copies.blocks:
                into = [experts[index] for index in copies.indices]
                self._transfer.outside(self._loads(layer, into, copies.addresses, address))
        finally:
            self._pool.release_copies(copies)
        for index in range(len(experts)) if len(copies.indices) < len(experts) else ():
            if index not in copies.indices:
                self._load_one(layer, experts[index], address)

    # ---- one expert

    def _load_one(self, layer: int, expert: int, address: int) -> None:
        handle = self._new_handle(layer, expert)
        try:
            self._ensure_copy(handle)
            self._transfer.outside(self._loads(layer, [expert], [handle.address], address))
        finally:
            self._pool.end_fill(handle)

    def _loads(self, layer: int, experts: Sequence[int], blocks: Sequence[int], address: int) -> Moves:
        layout = self._layouts[layer]
        return layout.fills(layout.place(self._layers[layer].n_experts), experts, blocks, address)

    def _new_handle(self, layer: int, expert: int) -> FillHandle:
        return FillHandle((layer, expert), self._layouts[layer].block_bytes, self._expert_bytes[layer])

    def _hint(self, layer: int, experts: Sequence[int]) -> None:
        """Tell the source which experts are read next, so that the disk works on all of them at once."""
        spans = self._layers[layer].spans
        self._source.will_need([span for expert in experts for span in spans(expert)])

    def _ensure_copy(self, handle: FillHandle, places: Sequence[int] | None = None) -> None:
        """Bring the expert's bytes into a block of host memory, the handle's.

        `places`, for slots in host memory, has the addresses of the matrices in the slot. A matrix that is read from
        the file is copied there at once, while the processor's cache still holds it.
        """
        self._pool.begin_fill(handle)
        if not handle.hit:
            self._read_copy(handle, places)

    def _read_copy(self, handle: FillHandle, places: Sequence[int] | None = None) -> None:
        layer, expert = handle.key
        begins = self._layouts[layer].block_offsets
        self._read(layer, expert, [handle.address + begin for begin in begins], places)
        self._pool.complete_fill(handle)

    def _read(
        self, layer: int, expert: int, addresses: Sequence[int], places: Sequence[int] | None = None
    ) -> None:
        """Read each matrix of an expert to its address in `addresses`, and copy it from there to its place."""

        def read(number: int, span: Span) -> None:
            memory = (ctypes.c_ubyte * span.n_bytes).from_address(addresses[number])
            self._source.read_into(span, memoryview(memory).cast("B"))
            if places is not None:
                self._transfer.on_host(places[number], addresses[number], span.n_bytes)

        tasks = [partial(read, number, span) for number, span in enumerate(self._layers[layer].spans(expert))]
        if self._expert_bytes[layer] >= READ_APART_BYTES:
            self._workers.run(tasks)
        else:
            for task in tasks:
                task()
