"""The serving of misses: an expert's bytes from host memory or the file into its slot."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from expertier.tiers.byte_source import ByteSource
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
    ) -> None:
        """Connect the tiers; nothing is read."""
        self._layers = layers
        self._layouts = layouts
        self._pool = pool
        self._source = source
        self._transfer = transfer

    def fill(self, layer: int, experts: Sequence[int], slots: Sequence[int]) -> None:
        """Fill `slots[i]` with `experts[i]`, one after another."""
        for expert, slot in zip(experts, slots, strict=True):
            self._fill_one(layer, expert, slot)

    def _fill_one(self, layer: int, expert: int, slot: int) -> None:
        staged = Staged((layer, expert), self._layouts[layer].block_bytes, self._layers[layer].expert_bytes)
        try:
            self._pool.stage(staged)
            if not staged.hit:
                self._read(layer, expert, staged.address)
                self._pool.commit(staged)
            self._transfer.into_slot(layer, slot, staged.address)
        finally:
            self._pool.leave(staged)

    def _read(self, layer: int, expert: int, block: int) -> None:
        """Read an expert's matrices into the host block at address `block`."""
        spans = self._layers[layer].spans(expert)
        for (offset, n_bytes), begin in zip(spans, self._layouts[layer].block_offsets, strict=True):
            memory = (ctypes.c_ubyte * n_bytes).from_address(block + begin)
            self._source.read_into(offset, memoryview(memory).cast("B"))
