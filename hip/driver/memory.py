"""Memory with an owner that frees it: device memory, and pinned host memory."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from mmap import MADV_DONTFORK, mmap

import numpy as np
import numpy.typing as npt

from expertier.errors import DeviceError, DriverError
from expertier.hip.driver.gpu import HOST_FLAGS, Gpu
from expertier.hip.driver.ownership import Owned
from expertier.hip.driver.stream_handle import StreamLike, stream_handle
from expertier.units import MIB, round_up

PAGE_BYTES = 4096

PINNED_SLAB_BYTES = 2 * MIB
"""The driver cuts smaller pinned allocations from pieces of this size: measured on CUDA 13, assumed for HIP."""


def pinned_cost(n_bytes: int) -> int:
    """Return how many bytes of host memory a pinned allocation of `n_bytes` takes.

    An allocation of `PINNED_SLAB_BYTES` or more takes whole pages. Smaller allocations of equal size share pieces of
    `PINNED_SLAB_BYTES`, as many as fit into one, so each takes its share of a piece: 1.5 MiB take a whole piece, 516
    KiB a third. For each size, the unused part of the last piece is not counted.
    """
    pages = round_up(n_bytes, PAGE_BYTES)
    if pages >= PINNED_SLAB_BYTES:
        return pages
    return -(-PINNED_SLAB_BYTES // (PINNED_SLAB_BYTES // pages))


class _Memory(Owned):
    """Memory of a GPU. Where it is dropped without `close`, queued work may still use it, so the GPU is waited for."""

    def _wait_for_users(self) -> None:
        with suppress(DriverError):
            self.gpu.synchronize()


class DeviceBuffer(_Memory):
    """Device memory in one allocation of the driver, not zeroed."""

    def __init__(self, gpu: Gpu, n_bytes: int) -> None:
        """Allocate exactly `n_bytes`. Raises `DriverError` with the bytes asked for and free."""
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
    """Pinned host memory, aligned to a page; all GPUs of the driver copy from it at full speed."""

    def __init__(self, gpu: Gpu, n_bytes: int) -> None:
        """Allocate `n_bytes`. Raises `DriverError`; it never falls back to pageable memory."""
        self.gpu = gpu
        self.n_bytes = n_bytes
        self._pages: mmap | None = None
        self.address = gpu.host_alloc(n_bytes)
        if self.address % PAGE_BYTES:
            # CUDA cuts small memory of all sizes from the same pieces, so memory of an odd size shifts what follows.
            # A larger allocation, to align inside of it, would take more than `pinned_cost` says, and L2's budget with
            # it. Pages of our own take no more.
            gpu.call("host_free", self.address)
            self._pages, self.address = _pin_pages(gpu, n_bytes)
        gpu.driver.pinned.add(self.address, n_bytes)
        self._closed = False

    def array(self) -> npt.NDArray[np.uint8]:
        """Return the memory as an array, uint8 [n_bytes], without a copy; it must not be used after `close`."""
        return np.ctypeslib.as_array((ctypes.c_uint8 * self.n_bytes).from_address(self.address))

    def device_address(self) -> int:
        """Return the address under which kernels read the buffer. Raises `DriverError`."""
        return self.gpu.handle("host_device_pointer", self.address, 0)

    def _release(self) -> None:
        self.gpu.driver.pinned.remove(self.address)
        if self._pages is None:
            self.gpu.call("host_free", self.address)
        else:
            self.gpu.call("host_unregister", self.address)
            self._pages.close()

    def __repr__(self) -> str:
        """Name the buffer for a message."""
        return f"PinnedBuffer({self.gpu.name}, {self.n_bytes} bytes at {self.address:#x})"


def _pin_pages(gpu: Gpu, n_bytes: int) -> tuple[mmap, int]:
    """Return new pages for `n_bytes`, pinned, and their address. Raises `DriverError`.

    They are not a forked child's, as memory of the driver is not: the driver would lose them where both write.
    """
    pages = mmap(-1, round_up(n_bytes, PAGE_BYTES))
    pages.madvise(MADV_DONTFORK)
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    try:
        gpu.call("host_register", address, len(pages), HOST_FLAGS)
    except BaseException:
        pages.close()
        raise
    return pages, address


class RegisteredRange(_Memory):
    """Host memory with another owner, which is pinned for as long as this object is open."""

    def __init__(self, gpu: Gpu, address: int, n_bytes: int) -> None:
        """Pin the pages. Raises `DeviceError`, also where they are pinned already."""
        self.gpu, self.address, self.n_bytes = gpu, address, n_bytes
        gpu.call("host_register", address, n_bytes, HOST_FLAGS)
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
