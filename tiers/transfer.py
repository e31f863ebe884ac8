"""The way from host memory into a slot."""

from __future__ import annotations

from expertier.hip.device import Device
from expertier.tiers.slab import Slab


class Transfer:
    """Copies experts from host blocks into slots, through the device."""

    def __init__(self, device: Device, slab: Slab) -> None:
        """Copy into `slab`, which lies on `device`."""
        self._device = device
        self._slab = slab

    def into_slot(self, layer: int, slot: int, block: int) -> None:
        """Copy the expert in the host block at address `block` into a slot; complete when it returns.

        Raises `DeviceError`; the slot's bytes are then undefined.
        """
        for target, source, n_bytes in self._slab.copies(layer, slot):
            self._device.copy_in(target, block + source, n_bytes)
