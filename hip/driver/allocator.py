"""Allocators of device memory: the driver, or another library's pool."""

from __future__ import annotations

from typing import Protocol

from expertier.hip.driver.gpu import Gpu
from expertier.hip.driver.memory import DeviceBuffer


class Allocation(Protocol):
    """Device memory that an `Allocator` gave."""

    @property
    def address(self) -> int:
        """The address of the first byte, aligned to a page."""

    @property
    def n_bytes(self) -> int:
        """The size in bytes."""

    def close(self) -> None:
        """Give the memory back; no queued work may still use it."""


class Allocator(Protocol):
    """Gives device memory."""

    def allocate(self, n_bytes: int) -> Allocation:
        """Return memory of exactly `n_bytes`, a multiple of 2 MiB. Raises `DeviceError`."""


class DriverAllocator:
    """An `Allocator` that takes memory from the driver."""

    def __init__(self, gpu: Gpu) -> None:
        """Allocate on `gpu`."""
        self._gpu = gpu

    def allocate(self, n_bytes: int) -> Allocation:
        """Return a new allocation of `n_bytes`. Raises `DriverError`, which names the bytes asked for and free."""
        return DeviceBuffer(self._gpu, n_bytes)
