"""The way from host memory into a slot."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from expertier.hip.device import Device
from expertier.hip.fence import Fence
from expertier.tiers.slab import Slab
from expertier.tiers.slot_fences import SlotFences


class Transfer:
    """Copies experts from host blocks into slots, on streams of its own where the device has some.

    Demand and prefetch have a stream each, so that a prefetch that is queued never holds a demand up.
    """

    def __init__(self, device: Device, slab: Slab, fences: SlotFences) -> None:
        """Copy into `slab`, which lies on `device`; `DeviceError` where no stream can be had."""
        self._device = device
        self._slab = slab
        self._fences = fences
        self._undo = ExitStack()
        self.demand_stream = self.prefetch_stream = 0
        if device.has_streams:
            with ExitStack() as undo:
                self.demand_stream = device.create_stream()
                undo.callback(device.destroy_stream, self.demand_stream)
                self.prefetch_stream = device.create_stream(low_priority=True)
                undo.callback(device.destroy_stream, self.prefetch_stream)
                self._undo = undo.pop_all()

    def into_slot(self, layer: int, slot: int, block: int, *, prefetch: bool = False) -> Fence | None:
        """Copy the expert in the host block at address `block` into a slot.

        Returns the fence after which the copy is complete; None where it is complete already. Raises
        `DeviceError`; the slot's bytes are then undefined, and nothing is queued that reads the block.
        """
        stream = self.prefetch_stream if prefetch else self.demand_stream
        self._fences.before_fill(layer, slot, stream)
        try:
            for target, source, n_bytes in self._slab.copies(layer, slot):
                self._device.copy_in(target, block + source, n_bytes, stream)
        except BaseException:
            if self._device.has_streams:
                self._device.synchronize()
            raise
        return self._fences.after_fill(layer, slot, stream)

    def outside(self, copies: Sequence[tuple[int, int, int]], block: int) -> None:
        """Copy pieces (target address, offset in the host block, bytes) elsewhere; complete when it returns."""
        for target, source, n_bytes in copies:
            self._device.copy_in(target, block + source, n_bytes, self.demand_stream)
        if self._device.has_streams:
            self._device.synchronize()

    def on_host(self, target: int, source: int, n_bytes: int) -> None:
        """Copy one matrix into a slot that is host memory; complete when it returns."""
        self._device.copy_in(target, source, n_bytes)

    def addresses(self, layer: int, slot: int) -> list[int]:
        """Return where a slot's matrices lie, for devices whose memory is the host's."""
        return [self._slab.base + place.offset + slot * place.stride for place in self._slab.places(layer)]

    def close(self) -> None:
        """Destroy the streams, whose work is done."""
        self._undo.close()
