"""The serving of misses: an expert's bytes from host memory or the file into its slot."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import partial

from expertier.hip.fence import Fence
from expertier.tiers.byte_source import ByteSource
from expertier.tiers.fill_workers import FillWorkers
from expertier.tiers.host_pool import HostPool
from expertier.tiers.layer import ExpertLayer
from expertier.tiers.slot_layout import SlotLayout
from expertier.tiers.staged import Staged
from expertier.tiers.transfer import Transfer


class Filler:
    """Fills slots: from L2 where it has a copy, otherwise from the source, through an L2 block or a bounce
    block.

    Thread-safe; called with no layer's lock held. An exception leaves the host pool as if the failed expert
    had not been asked for, and the bytes of the slots undefined.
    """

    def __init__(
        self,
        layers: Sequence[ExpertLayer],
        layouts: Sequence[SlotLayout],
        pool: HostPool,
        source: ByteSource,
        transfer: Transfer,
        workers: FillWorkers,
    ) -> None:
        """Connect the tiers; nothing is read."""
        self._layers = layers
        self._layouts = layouts
        self._pool = pool
        self._source = source
        self._transfer = transfer
        self._workers = workers

    def fill(self, layer: int, experts: Sequence[int], slots: Sequence[int]) -> None:
        """Fill `slots[i]` with `experts[i]`, several at a time; on a device with streams, queue that."""
        self._workers.run(
            [partial(self.fill_one, layer, expert, slot) for expert, slot in zip(experts, slots, strict=True)]
        )

    def fill_one(self, layer: int, expert: int, slot: int, *, prefetch: bool = False) -> None:
        """Fill one slot on this thread; a prefetch has a stream of its own."""
        staged = self._empty(layer, expert)
        fence: Fence | None = None
        try:
            self._stage(staged)
            fence = self._transfer.into_slot(layer, slot, staged.address, prefetch=prefetch)
        finally:
            self._pool.leave(staged, fence)

    def stage_one(self, layer: int, expert: int) -> None:
        """Bring an expert into the host pool only, where that has room for it."""
        staged = self._empty(layer, expert)
        try:
            self._stage(staged)
        finally:
            self._pool.leave(staged)

    def _empty(self, layer: int, expert: int) -> Staged:
        return Staged((layer, expert), self._layouts[layer].block_bytes, self._layers[layer].expert_bytes)

    def _stage(self, staged: Staged) -> None:
        """Have the expert's bytes in a block of host memory."""
        self._pool.stage(staged)
        if not staged.hit:
            self._read(*staged.key, staged.address)
            self._pool.commit(staged)

    def _read(self, layer: int, expert: int, block: int) -> None:
        """Read an expert's matrices into the host block at address `block`."""
        spans = self._layers[layer].spans(expert)
        for span, begin in zip(spans, self._layouts[layer].block_offsets, strict=True):
            memory = (ctypes.c_ubyte * span.n_bytes).from_address(block + begin)
            self._source.read_into(span, memoryview(memory).cast("B"))
