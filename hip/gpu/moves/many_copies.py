"""Many copies from host memory to a device, in one call where the device has one."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from expertier.hip.device import Device, Moves


@runtime_checkable
class CopiesMany(Protocol):
    """A device that queues many copies for less than one at a time costs."""

    def copy_in_many(self, moves: Moves, stream: int = 0) -> None:
        """Do what `copy_in` of each row of `moves` does: (target, pinned source, bytes), targets apart.

        Raises `DeviceError`; some may be queued then.
        """

    def prepare_copies(self) -> None:
        """Have ready what the first `copy_in_many` would wait for."""


class ManyCopies:
    """Copies pieces of host memory to a device. Thread-safe."""

    def __init__(self, device: Device) -> None:
        """Look at what the device can do, once: that takes longer than queueing a few copies."""
        self._device = device
        self._at_once = device if isinstance(device, CopiesMany) else None
        if self._at_once is not None:
            self._at_once.prepare_copies()

    def copy_in(self, moves: Moves, stream: int = 0) -> None:
        """Do what `Device.copy_in` of each row of `moves`, (target, pinned source, bytes), does; targets are apart.

        Raises what that raises; copies of rows before the one that failed may be queued then.
        """
        if self._at_once is not None:
            self._at_once.copy_in_many(moves, stream)
            return
        for target, source, n_bytes in moves.tolist():
            self._device.copy_in(target, source, n_bytes, stream)
