"""Zeroes many small pieces of device memory at once, after moving other pieces where that is asked for."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from expertier.hip.device import Device, Moves

Pieces = npt.NDArray[np.int64]


@runtime_checkable
class ZeroesMany(Protocol):
    """A device that can zero many pieces in one call, faster than piece by piece."""

    def zero_all(self, pieces: Pieces, stream: int = 0) -> None:
        """Fill pieces, rows of (address, bytes), with zeros. Raises `DeviceError`; some pieces may be zero then."""


def zero_pieces(device: Device, pieces: Pieces, stream: int = 0) -> None:
    """Fill pieces of a device's memory, rows of (address, bytes), with zeros. Raises what `Device.zero` raises."""
    if isinstance(device, ZeroesMany):
        device.zero_all(pieces, stream)
        return
    for address, n_bytes in pieces.tolist():
        device.zero(address, n_bytes, stream)


@runtime_checkable
class Relocates(Protocol):
    """A device that moves pieces and then zeroes other pieces in one call, which does not wait for the work."""

    def relocate(self, moves: Moves, zeros: Pieces, stream: int = 0) -> None:
        """Queue what `copy_within` of `moves` and then `zero_all` of `zeros` do. Raises `DeviceError`."""

    def finish(self) -> None:
        """Wait until the work of `relocate` is done. Until then nothing else may use the memory concerned."""


class Relocator:
    """Moves pieces of a device's memory and then zeroes other pieces, in one call where the device can do that."""

    def __init__(self, device: Device) -> None:
        """Find out what the device can do. That is done once, because it takes longer than a small move."""
        self._device = device
        self._at_once = device if isinstance(device, Relocates) else None

    def relocate(self, moves: Moves, zeros: Pieces, stream: int = 0) -> None:
        """Do what `copy_within` of `moves` and then `zero_pieces` of `zeros` do, and raise what they raise.

        The work is queued on `stream`. On a device without streams it is done when `finish` returns, if not before.
        """
        if self._at_once is not None:
            self._at_once.relocate(moves, zeros, stream)
            return
        if len(moves):
            self._device.copy_within(moves, stream)
        zero_pieces(self._device, zeros, stream)

    def finish(self) -> None:
        """Wait for the work on a device without streams."""
        if self._at_once is not None:
            self._at_once.finish()
