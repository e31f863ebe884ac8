"""The memory of a slab: one plain allocation, or a virtual range that grows and shrinks without moving."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Protocol

from expertier.errors import DeviceError
from expertier.hip.device import Device
from expertier.hip.driver.gpu import Gpu
from expertier.hip.gpu.device import GpuDevice
from expertier.hip.gpu.vmm.probe import probe_vmm
from expertier.hip.gpu.vmm.virtual_memory import VirtualRange, Waitable
from expertier.units import mib

_log = logging.getLogger(__name__)


class SlabMemory(Protocol):
    """Device memory from a base that never moves."""

    @property
    def base(self) -> int:
        """Its address."""

    @property
    def n_bytes(self) -> int:
        """Bytes from the base that can be used now."""

    @property
    def capacity_bytes(self) -> int:
        """The most that `resize` can make of it."""

    @property
    def resizable(self) -> bool:
        """Whether `resize` can change the size at all."""

    def resize(self, n_bytes: int, after: Iterable[Waitable] | None = None) -> None:
        """Make at least `n_bytes` usable and give back what is beyond, in whole chunks.

        New bytes are zero; those that stay keep their content. `after`: what to wait for before memory is taken
        away, by default all work of the GPU. Raises `DeviceError`, and is as before then.
        """

    def close(self) -> None:
        """Give everything back; no queued work may still use it. A second call does nothing."""


class PlainSlabMemory:
    """One allocation of the device."""

    def __init__(self, device: Device, n_bytes: int) -> None:
        """Allocate. Raises `DeviceError`."""
        self._device = device
        self.base = device.alloc(n_bytes)
        self.n_bytes = n_bytes
        self._closed = False

    @property
    def capacity_bytes(self) -> int:
        """Its size."""
        return self.n_bytes

    @property
    def resizable(self) -> bool:
        """False."""
        return False

    def resize(self, n_bytes: int, after: Iterable[Waitable] | None = None) -> None:  # noqa: ARG002
        """Refuse any other size."""
        if n_bytes != self.n_bytes:
            raise DeviceError(
                f"asked to make a slab of {mib(self.n_bytes)} one of {mib(n_bytes)}: it is one plain allocation "
                "and keeps its size; set MOE_SLAB_VMM=1 where the driver's virtual memory can be trusted"
            )

    def close(self) -> None:
        """Free it."""
        if not self._closed:
            self._closed = True
            self._device.free(self.base)


class VmmSlabMemory:
    """A virtual range with memory under its first bytes; counted among the device's `device_bytes`."""

    def __init__(self, device: GpuDevice, memory: VirtualRange) -> None:
        """Take over the range; the device frees it."""
        self._device = device
        self._memory = memory
        self._closed = False
        device.keep(memory)

    @property
    def base(self) -> int:
        """The range's address."""
        return self._memory.address

    @property
    def n_bytes(self) -> int:
        """Bytes with memory, in whole chunks."""
        return self._memory.n_bytes

    @property
    def capacity_bytes(self) -> int:
        """The reserved addresses."""
        return self._memory.reserved_bytes

    @property
    def chunk_bytes(self) -> int:
        """The unit of growth."""
        return self._memory.chunk_bytes

    @property
    def resizable(self) -> bool:
        """True."""
        return True

    def resize(self, n_bytes: int, after: Iterable[Waitable] | None = None) -> None:
        """Grow or shrink at the end."""
        if not 0 < n_bytes <= self.capacity_bytes:
            raise DeviceError(
                f"asked to make a slab of {mib(self.n_bytes)} one of {mib(n_bytes)}: its addresses end at "
                f"{mib(self.capacity_bytes)}"
            )
        self._memory.grow_to(n_bytes)
        self._memory.shrink_to(n_bytes, after)

    def close(self) -> None:
        """Unmap, release, and give the addresses back."""
        if not self._closed:
            self._closed = True
            self._device.free(self.base)


def open_slab_memory(
    device: Device,
    n_bytes: int,
    *,
    vmm: bool = False,
    capacity_bytes: int | None = None,
    peers: Sequence[Gpu] = (),
) -> SlabMemory:
    """Return zeroed memory for a slab: plain, or with `vmm` a range that can grow to `capacity_bytes`.

    Where virtual memory cannot be had or fails its probe, a warning says at which step, and the slab is plain.
    `peers` get access to all of a virtual slab. Raises `DeviceError` where there is not enough memory.
    """
    if vmm and not isinstance(device, GpuDevice):
        _log.warning("%s has no virtual memory management; the slab is one plain allocation", device.name)
    elif vmm and isinstance(device, GpuDevice):
        result = probe_vmm(device.gpu)
        if result.passed:
            return _virtual(device, n_bytes, capacity_bytes or n_bytes, peers, result.access_from_base)
        _log.warning(
            "%s: virtual memory failed its probe at the step «%s» (%s); the slab is one plain allocation",
            device.name,
            result.failed,
            result.detail,
        )
    return PlainSlabMemory(device, n_bytes)


def _virtual(
    device: GpuDevice, n_bytes: int, capacity_bytes: int, peers: Sequence[Gpu], access_from_base: bool
) -> VmmSlabMemory:
    memory = VirtualRange(
        device.gpu, max(n_bytes, capacity_bytes), peers=peers, access_from_base=access_from_base
    )
    try:
        memory.grow_to(n_bytes)
    except BaseException:
        memory.close()
        raise
    return VmmSlabMemory(device, memory)
