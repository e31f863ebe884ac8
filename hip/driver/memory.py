"""Memory that is owned: on the GPU, and pinned on the host."""

from __future__ import annotations

import ctypes
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from expertier.errors import DeviceError, DriverError
from expertier.hip.driver.gpu import Gpu
from expertier.hip.driver.ownership import Owned
from expertier.hip.driver.stream_handle import StreamLike, stream_handle
from expertier.units import MIB, round_up

PAGE_BYTES = 4096

PINNED_SLAB_BYTES = 2 * MIB
"""What a driver cuts smaller pinned allocations from: measured on CUDA 13, assumed of HIP."""


def pinned_cost(n_bytes: int) -> int:
    """Return what a pinned allocation of `n_bytes` takes from the host, in bytes.

    From `PINNED_SLAB_BYTES` on that is whole pages. Smaller ones share slabs of that size, as many as fit into
    one, so each costs its share of a slab: 1.5 MiB a whole one, 516 KiB a third. Up to one slab a size, in which
    the last ones lie, is not counted.
    """
    pages = round_up(n_bytes, PAGE_BYTES)
    if pages >= PINNED_SLAB_BYTES:
        return pages
    return -(-PINNED_SLAB_BYTES // (PINNED_SLAB_BYTES // pages))


class _Memory(Owned):
    """Memory of a GPU's: when it goes by itself, queued work may still use it."""

    gpu: Gpu

    def _wait_for_users(self) -> None:
        with suppress(DriverError):
            self.gpu.synchronize()


class DeviceBuffer(_Memory):
    """Bytes of device memory, one allocation of the driver's. Not zeroed."""

    def __init__(self, gpu: Gpu, n_bytes: int) -> None:
        """Allocate exactly `n_bytes`. Raises `DriverError` with bytes asked and free."""
        self.gpu = gpu
        self.n_bytes = n_bytes
        self.address = gpu.take_memory("alloc", n_bytes, what="device memory")
        self._closed = False

    def zero(self, stream: StreamLike = 0) -> None:
        """Queue a fill with zeros."""
        self.gpu.call("fill", self.address, 0, self.n_bytes, stream_handle(stream))

    def _release(self) -> None:
        self.gpu.call("free", self.address)

    def __repr__(self) -> str:
        """Name the buffer for a message."""
        return f"DeviceBuffer({self.gpu.name}, {self.n_bytes} bytes at {self.address:#x})"


class PinnedBuffer(_Memory):
    """Bytes of pinned host memory, aligned to a page; all GPUs of the driver copy from it at full speed."""

    def __init__(self, gpu: Gpu, n_bytes: int) -> None:
        """Allocate `n_bytes`. Raises `DriverError`; never falls back to pageable memory."""
        self.gpu = gpu
        self.n_bytes = n_bytes
        self.allocated_bytes = n_bytes
        self._base = gpu.host_alloc(n_bytes)
        if self._base % PAGE_BYTES:
            # A driver may cut small allocations out of a larger one.
            gpu.call("host_free", self._base)
            self.allocated_bytes = n_bytes + PAGE_BYTES
            self._base = gpu.host_alloc(self.allocated_bytes)
        self.address = -(-self._base // PAGE_BYTES) * PAGE_BYTES
        gpu.driver.pinned.add(self.address, n_bytes)
        self._closed = False

    def array(self) -> npt.NDArray[np.uint8]:
        """Return the bytes as an array, uint8 [n_bytes], without a copy; it ends with the buffer."""
        return np.ctypeslib.as_array((ctypes.c_uint8 * self.n_bytes).from_address(self.address))

    def device_address(self) -> int:
        """Return the address under which kernels read the buffer. Raises `DriverError`."""
        return self.gpu.handle("host_device_pointer", self.address, 0)

    def _release(self) -> None:
        self.gpu.driver.pinned.remove(self.address)
        self.gpu.call("host_free", self._base)

    def __repr__(self) -> str:
        """Name the buffer for a message."""
        return f"PinnedBuffer({self.gpu.name}, {self.n_bytes} bytes at {self.address:#x})"


class RegisteredRange(_Memory):
    """Host memory of someone else that is pinned for as long as this object is open."""

    def __init__(self, gpu: Gpu, address: int, n_bytes: int) -> None:
        """Pin the pages. Raises `DriverError`, also where they are pinned already."""
        self.gpu, self.address, self.n_bytes = gpu, address, n_bytes
        gpu.call("host_register", address, n_bytes, 0x1 | 0x2)
        try:
            gpu.driver.pinned.add(address, n_bytes)
        except AssertionError as error:
            gpu.call("host_unregister", address)
            raise DeviceError(f"asked to pin {n_bytes} bytes at {address:#x}: {error}") from error
        self._closed = False

    def _release(self) -> None:
        self.gpu.driver.pinned.remove(self.address)
        self.gpu.call("host_unregister", self.address)

    def __repr__(self) -> str:
        """Name the range for a message."""
        return f"RegisteredRange({self.gpu.name}, {self.n_bytes} bytes at {self.address:#x})"
