"""The host as a device."""

from __future__ import annotations

import ctypes
import mmap
import threading
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from expertier.errors import DeviceError
from expertier.units import mib, round_up


@dataclass(frozen=True, slots=True)
class _Mapping:
    memory: mmap.mmap
    n_bytes: int
    pinned: bool


class HostDevice:
    """Anonymous memory of this process, owned and counted here; copies are complete when they return.

    Nothing moves by DMA, so "pinned" memory is plain memory as well. Allocations are mappings of their own:
    pages are zero, cost no RAM before their first use, and go back to the system when freed.
    """

    def __init__(self) -> None:
        """Open the host; there is nothing that could fail."""
        self._lock = threading.Lock()
        self._mappings: dict[int, _Mapping] = {}
        self._closed = False

    @property
    def name(self) -> str:
        """`host`."""
        return "host"

    @property
    def has_streams(self) -> bool:
        """False: a copy is complete when it returns."""
        return False

    @property
    def device_bytes(self) -> int:
        """Live bytes of `alloc`, in whole pages."""
        return self._live_bytes(pinned=False)

    @property
    def pinned_bytes(self) -> int:
        """Live bytes of `alloc_pinned`, in whole pages."""
        return self._live_bytes(pinned=True)

    def allocation_bytes(self, n_bytes: int) -> int:
        """Return `n_bytes` in whole pages."""
        return round_up(n_bytes, mmap.PAGESIZE)

    def alloc(self, n_bytes: int) -> int:
        """Map `n_bytes` of zeroed memory."""
        return self._map(n_bytes, pinned=False)

    def alloc_pinned(self, n_bytes: int) -> int:
        """Map `n_bytes` of zeroed memory, counted as pinned."""
        return self._map(n_bytes, pinned=True)

    def free(self, address: int) -> None:
        """Unmap what `alloc` or `alloc_pinned` returned."""
        with self._lock:
            mapping = self._mappings.pop(address, None)
        if mapping is None:
            raise DeviceError(f"free of {address:#x}: no live allocation of this device begins there")
        mapping.memory.close()

    def copy_in(self, target: int, source: int, n_bytes: int) -> None:
        """Copy `n_bytes` between two places in memory that do not overlap."""
        ctypes.memmove(target, source, n_bytes)

    def zero(self, target: int, n_bytes: int) -> None:
        """Fill with zeros; a whole allocation gives its pages back to the system instead."""
        with self._lock:
            mapping = self._mappings.get(target)
            if mapping is not None and mapping.n_bytes == self.allocation_bytes(n_bytes):
                mapping.memory.madvise(mmap.MADV_DONTNEED)
                return
        ctypes.memset(target, 0, n_bytes)

    def close(self) -> None:
        """End the use of the host; `DeviceError` names what is still allocated."""
        self._closed = True
        if self._mappings:
            raise DeviceError(
                f"host device closed with {len(self._mappings)} allocations still live: "
                f"{mib(self.device_bytes)} of device and {mib(self.pinned_bytes)} of pinned memory; "
                "close the TierManager first"
            )

    def __enter__(self) -> Self:
        """Return the device itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close; an error that is already on its way goes first."""
        if error is None:
            self.close()
        else:
            self._closed = True

    def _live_bytes(self, *, pinned: bool) -> int:
        with self._lock:
            return sum(mapping.n_bytes for mapping in self._mappings.values() if mapping.pinned == pinned)

    def _map(self, n_bytes: int, *, pinned: bool) -> int:
        if self._closed:
            raise DeviceError("the host device was closed: open another one")
        if n_bytes < 1:
            raise ValueError(f"an allocation needs at least one byte, asked for {n_bytes}")
        size = self.allocation_bytes(n_bytes)
        try:
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise DeviceError(
                f"asked the host for {mib(size)}, found no memory for it ({error}); "
                f"{mib(self.device_bytes + self.pinned_bytes)} are allocated here: lower the budgets"
            ) from error
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        with self._lock:
            self._mappings[address] = _Mapping(memory, size, pinned)
        return address
