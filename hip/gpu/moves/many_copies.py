"""Many copies from host memory to a device, in one call where the device can do that."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from expertier.hip.device import Device, Moves


@runtime_checkable
class CopiesMany(Protocol):
    """A device that can queue many copies in one call, faster than one by one."""

    def copy_in_many(self, moves: Moves, stream: int = 0) -> None:
        """Do what `copy_in` does for each row (target, pinned source, bytes) of `moves`; targets must not overlap.

        Raises `DeviceError`; some of the copies may be queued then.
        """

    def prepare_copies(self) -> None:
        """Do the preparation that the first `copy_in_many` would otherwise wait for."""


class ManyCopies:
    """Copies pieces of host memory to a device. Thread-safe."""

    def __init__(self, device: Device) -> None:
        """Find out what the device can do. That is done once, because it takes longer than queueing a few copies."""
        self._device = device
        self._at_once = device if isinstance(device, CopiesMany) else None
        if self._at_once is not None:
            self._at_once.prepare_copies()

    def copy_in(self, moves: Moves, stream: int = 0) -> None:
        """Do what `Device.copy_in` does for each row (target, pinned source, bytes) of `moves`.

        Targets must not overlap. Raises what `Device.copy_in` raises; copies of earlier rows may be queued then.
        """
        if self._at_once is not None:
            self._at_once.copy_in_many(moves, stream)
            return
        for target, source, n_bytes in moves.tolist():
            self._device.copy_in(target, source, n_bytes, stream)
