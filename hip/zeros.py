"""Many small pieces of device memory to be zeroed at once."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from expertier.hip.device import Device

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
