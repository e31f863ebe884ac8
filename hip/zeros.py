"""Many small pieces of device memory to be zeroed at once, and pieces moved before that."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from expertier.hip.device import Device, Moves

Pieces = npt.NDArray[np.int64]


@runtime_checkable
class ZeroesMany(Protocol):
    """A device that queues many zeros for less than one at a time costs."""

    def zero_all(self, pieces: Pieces, stream: int = 0) -> None:
        """Fill pieces, rows of (address, bytes), with zeros. Raises `DeviceError`; some are zero then."""


def zero_pieces(device: Device, pieces: Pieces, stream: int = 0) -> None:
    """Fill pieces of a device's memory, rows of (address, bytes), with zeros; raises as `Device.zero` does."""
    if isinstance(device, ZeroesMany):
        device.zero_all(pieces, stream)
        return
    for address, n_bytes in pieces.tolist():
        device.zero(address, n_bytes, stream)


@runtime_checkable
class Relocates(Protocol):
    """A device that moves pieces and then zeroes others for less than two calls cost, while the caller goes on."""

    def relocate(self, moves: Moves, zeros: Pieces, stream: int = 0) -> None:
        """Queue what `copy_within` of `moves` and then `zero_all` of `zeros` do. Raises `DeviceError`."""

    def finish(self) -> None:
        """Wait for it. Before that nothing else may use the memory that it is in."""


class Relocator:
    """Moves pieces of a device's memory and then zeroes others, in one call where the device has one."""

    def __init__(self, device: Device) -> None:
        """Look at what the device can do, once: that takes longer than a small move."""
        self._device = device
        self._at_once = device if isinstance(device, Relocates) else None

    def relocate(self, moves: Moves, zeros: Pieces, stream: int = 0) -> None:
        """Do what `copy_within` of `moves` and then `zero_pieces` of `zeros` do; raises as these do.

        It is queued on `stream`. Without streams it is done when `finish` returns, at the latest.
        """
        if self._at_once is not None:
            self._at_once.relocate(moves, zeros, stream)
            return
        if len(moves):
            self._device.copy_within(moves, stream)
        zero_pieces(self._device, zeros, stream)

    def finish(self) -> None:
        """Wait, on a device without streams."""
        if self._at_once is not None:
            self._at_once.finish()
