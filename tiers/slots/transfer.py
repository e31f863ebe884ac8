"""Copies experts from host memory into slots."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from expertier.hip.device import Device, Moves
from expertier.hip.fence import Fence
from expertier.hip.gpu.moves.many_copies import ManyCopies
from expertier.tiers.slots.fences import SlotFences
from expertier.tiers.slots.slab import Slab


class Transfer:
    """Copies experts from host blocks into slots, on streams of its own where the device has streams.

    Demand and prefetches have a stream each, so that no copy on demand waits for a prefetch that was queued before.
    """

    def __init__(self, device: Device, slab: Slab, fences: SlotFences) -> None:
        """Copy into `slab`, which lies on `device`. Raises `DeviceError` where no stream can be created."""
        self._device = device
        self._slab = slab
        self._fences = fences
        self._copies = ManyCopies(device)
        self._undo = ExitStack()
        self.demand_stream = self.prefetch_stream = 0
        if device.has_streams:
            with ExitStack() as undo:
                self.demand_stream = device.create_stream()
                undo.callback(device.destroy_stream, self.demand_stream)
                self.prefetch_stream = device.create_stream(low_priority=True)
                undo.callback(device.destroy_stream, self.prefetch_stream)
                self._undo = undo.pop_all()

    def into_slots(
        self, layer: int, slots: Sequence[int], blocks: Sequence[int], *, prefetch: bool = False
    ) -> Fence | None:
        """Copy the expert in the host block at address `blocks[i]` into `slots[i]`, for each i.

        Returns the fence after which all slots are complete; None where they are complete already. Raises
        `DeviceError`; the slots' bytes are then undefined, and no queued work reads a block.
        """
        stream = self.prefetch_stream if prefetch else self.demand_stream
        self._fences.before_fill(layer, slots, stream)
        self._queue(self._slab.fills(layer, slots, blocks), stream)
        return self._fences.after_fill(layer, slots, stream)

    def outside(self, moves: Moves) -> None:
        """Copy pieces, rows (target, source, bytes), to memory outside the slots; wait until all work is done."""
        self._queue(moves, self.demand_stream)
        if self._device.has_streams:
            self._device.synchronize()

    def _queue(self, moves: Moves, stream: int) -> None:
        try:
            self._copies.copy_in(moves, stream)
        except BaseException:
            if self._device.has_streams:
                self._device.synchronize()
            raise

    def on_host(self, target: int, source: int, n_bytes: int) -> None:
        """Copy one matrix into a slot in host memory; the copy is complete when this returns."""
        self._device.copy_in(target, source, n_bytes)

    def addresses(self, layer: int, slot: int) -> list[int]:
        """Return the address of each matrix of a slot, for devices whose memory is host memory."""
        return [self._slab.base + place.offset + slot * place.stride for place in self._slab.places(layer)]

    def close(self) -> None:
        """Destroy the streams; all work on them must be done."""
        self._undo.close()
