"""The memory of a slab: one plain allocation, or a range of virtual memory that grows and shrinks without moving."""

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
    """Device memory whose base never moves."""

    @property
    def base(self) -> int:
        """The address of the first byte."""

    @property
    def n_bytes(self) -> int:
        """How many bytes from the base on can be used now."""

    @property
    def capacity_bytes(self) -> int:
        """The largest size that `resize` can set."""

    @property
    def resizable(self) -> bool:
        """Whether `resize` can change the size at all."""

    def resize(self, n_bytes: int, after: Iterable[Waitable] | None = None) -> None:
        """Make at least `n_bytes` usable, and give memory beyond that back, in whole chunks.

        New bytes are zero, and bytes that stay keep their content. Before memory is given back, everything in `after`
        is waited for, by default all work of the GPU. Raises `DeviceError`, with nothing changed.
        """

    def close(self) -> None:
        """Give all memory back; no queued work may still use it. A second call does nothing."""


class PlainSlabMemory:
    """A `SlabMemory` that is one allocation and cannot be resized."""

    def __init__(self, device: Device, n_bytes: int) -> None:
        """Allocate `n_bytes`. Raises `DeviceError`."""
        self._device = device
        self.base = device.alloc(n_bytes)
        self.n_bytes = n_bytes
        self._closed = False

    @property
    def capacity_bytes(self) -> int:
        """The size, which never changes."""
        return self.n_bytes

    @property
    def resizable(self) -> bool:
        """False: the size never changes."""
        return False

    def resize(self, n_bytes: int, after: Iterable[Waitable] | None = None) -> None:  # noqa: ARG002
        """Raise `DeviceError` for any size except the present one."""
        if n_bytes != self.n_bytes:
            raise DeviceError(
                f"asked to resize a slab of {mib(self.n_bytes)} to {mib(n_bytes)}: it is one plain allocation, which "
                "keeps its size; set MOE_SLAB_VMM=1 where the driver's virtual memory can be trusted"
            )

    def close(self) -> None:
        """Free the memory; a second call does nothing."""
        if not self._closed:
            self._closed = True
            self._device.free(self.base)


class VmmSlabMemory:
    """A `SlabMemory` in a `VirtualRange`, whose first bytes have memory; the device's `device_bytes` counts it."""

    def __init__(self, device: GpuDevice, memory: VirtualRange) -> None:
        """Take over the range, and have `device` count and free it."""
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
        """The bytes that have memory, in whole chunks."""
        return self._memory.n_bytes

    @property
    def capacity_bytes(self) -> int:
        """The bytes of addresses that are reserved."""
        return self._memory.reserved_bytes

    @property
    def chunk_bytes(self) -> int:
        """The bytes of one chunk: memory is taken and given back in chunks."""
        return self._memory.chunk_bytes

    @property
    def resizable(self) -> bool:
        """True: memory can be added and given back at the end."""
        return True

    def resize(self, n_bytes: int, after: Iterable[Waitable] | None = None) -> None:
        """Add memory at the end of the used range, or give memory there back."""
        if not 0 < n_bytes <= self.capacity_bytes:
            raise DeviceError(
                f"asked to resize a slab of {mib(self.n_bytes)} to {mib(n_bytes)}: its addresses end at "
                f"{mib(self.capacity_bytes)}; ask for no more than that"
            )
        self._memory.grow_to(n_bytes)
        self._memory.shrink_to(n_bytes, after)

    def close(self) -> None:
        """Give memory and addresses back; a second call does nothing."""
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
    """Return zeroed memory for a slab: plain, or with `vmm` a virtual range that can grow to `capacity_bytes`.

    Where the device has no virtual memory, or the probe fails, a warning says so, with the step that failed, and the
    memory is plain. `peers` get access to all of a virtual slab. Raises `DeviceError` where there is not enough memory.
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
