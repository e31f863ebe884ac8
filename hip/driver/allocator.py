"""Where a device's memory comes from: the driver, or another library's pool."""

from __future__ import annotations

from typing import Protocol

from expertier.hip.driver.gpu import Gpu
from expertier.hip.driver.memory import DeviceBuffer


class Allocation(Protocol):
    """Device memory that someone handed out."""

    @property
    def address(self) -> int:
        """Where it begins; aligned to a page."""

    @property
    def n_bytes(self) -> int:
        """Its size."""

    def close(self) -> None:
        """Give it back; no queued work may still use it."""


class Allocator(Protocol):
    """Hands out device memory."""

    def allocate(self, n_bytes: int) -> Allocation:
        """Return memory of exactly `n_bytes`, a multiple of 2 MiB. Raises `DeviceError`."""


class DriverAllocator:
    """The driver's own allocations."""

    def __init__(self, gpu: Gpu) -> None:
        """Allocate on this GPU."""
        self._gpu = gpu

    def allocate(self, n_bytes: int) -> Allocation:
        """Allocate. Raises `DriverError` with bytes asked and free."""
        return DeviceBuffer(self._gpu, n_bytes)
