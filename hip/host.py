"""The host's memory as a device."""
# ruff: noqa: ARG002 (a host without streams does not use all arguments of the protocol)

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import psutil

from expertier.errors import DeviceError
from expertier.hip.device import Moves
from expertier.hip.zeros import Pieces
from expertier.interrupts import completing, handing_over
from expertier.units import MIB, mib, round_up

_HUGE_BYTES = 4 * MIB
"""Mappings from this size on ask for huge pages, which take one page fault and one TLB entry for 2 MiB."""


@dataclass(frozen=True, slots=True)
class _Mapping:
    memory: mmap.mmap
    n_bytes: int
    pinned: bool


class HostDevice:
    """The host as a device: its memory is anonymous memory of this process. Copies are complete when a call returns.

    No copy uses DMA, so "pinned" memory is ordinary memory, too. Each allocation is a mapping of its own. Its pages are
    zero, are huge where the system has huge pages, take no RAM before their first use, and go back to the system when
    they are freed.
    """

    def __init__(self) -> None:
        """Open the host, which cannot fail."""
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
    def has_own_memory(self) -> bool:
        """False: the memory is the host's."""
        return False

    @property
    def device_bytes(self) -> int:
        """The bytes of `alloc` that were not freed yet, in whole pages."""
        return self._live_bytes(pinned=False)

    @property
    def pinned_bytes(self) -> int:
        """The bytes of `alloc_pinned` that were not freed yet, in whole pages."""
        return self._live_bytes(pinned=True)

    def free_bytes(self) -> int:
        """Return the bytes of RAM that are available without swapping."""
        try:
            return int(psutil.virtual_memory().available)
        except OSError:  # there is no /proc
            return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def allocation_bytes(self, n_bytes: int) -> int:
        """Return `n_bytes` in whole pages."""
        return round_up(n_bytes, mmap.PAGESIZE)

    def pinned_allocation_bytes(self, n_bytes: int) -> int:
        """Return `n_bytes` in whole pages."""
        return round_up(n_bytes, mmap.PAGESIZE)

    @handing_over(lambda address, self, *_: self.free(address))
    def alloc(self, n_bytes: int) -> int:
        """Map `n_bytes` of zeroed memory."""
        return self._map(n_bytes, pinned=False)

    @handing_over(lambda address, self, *_: self.free(address))
    def alloc_pinned(self, n_bytes: int) -> int:
        """Map `n_bytes` of zeroed memory, counted as pinned."""
        return self._map(n_bytes, pinned=True)

    @completing
    def free(self, address: int) -> None:
        """Unmap memory of `alloc` or `alloc_pinned`."""
        with self._lock:
            mapping = self._mappings.pop(address, None)
        if mapping is None:
            raise DeviceError(f"free of {address:#x}: no live allocation of this device begins there")
        mapping.memory.close()

    def create_stream(self, *, low_priority: bool = False) -> int:
        """Raise `DeviceError`: the host has no streams, as its work is done at once."""
        raise DeviceError("asked the host device for a stream: it has none; queue nothing, or open a GPU")

    def destroy_stream(self, stream: int) -> None:
        """Raise `DeviceError`: the host has no streams."""
        raise DeviceError(f"asked the host device to destroy stream {stream}: it has none")

    def create_event(self) -> int:
        """Return 0, which stands for all events; every event is done at once."""
        return 0

    def destroy_event(self, event: int) -> None:
        """Do nothing."""

    def record_event(self, event: int, stream: int) -> None:
        """Do nothing: all work is done."""

    def event_done(self, event: int) -> bool:
        """Return True."""
        return True

    def wait_event(self, event: int) -> None:
        """Do nothing: all work is done."""

    def stream_wait_event(self, stream: int, event: int) -> None:
        """Do nothing: all work is done."""

    def synchronize(self) -> None:
        """Do nothing: all work is done."""

    def copy_in(self, target: int, source: int, n_bytes: int, stream: int = 0) -> None:
        """Copy `n_bytes` between two places in memory that do not overlap."""
        ctypes.memmove(target, source, n_bytes)

    def copy_in_many(self, moves: Moves, stream: int = 0) -> None:
        """Copy pieces, rows of (target, source, bytes), one after another."""
        for target, source, n_bytes in moves.tolist():
            ctypes.memmove(target, source, n_bytes)

    def prepare_copies(self) -> None:
        """Do nothing: copies need no preparation."""

    def copy_out(self, target: int, source: int, n_bytes: int, stream: int = 0) -> None:
        """Copy `n_bytes` between two places in memory that do not overlap."""
        ctypes.memmove(target, source, n_bytes)

    def copy_within(self, moves: Moves, stream: int = 0) -> None:
        """Move pieces, rows of (target, source, bytes), one after another."""
        for target, source, n_bytes in moves.tolist():
            ctypes.memmove(target, source, n_bytes)

    def zero(self, target: int, n_bytes: int, stream: int = 0) -> None:
        """Fill memory with zeros; a whole allocation is zeroed by giving its pages back to the system."""
        with self._lock:
            mapping = self._mappings.get(target)
            if mapping is not None and mapping.n_bytes == self.allocation_bytes(n_bytes):
                mapping.memory.madvise(mmap.MADV_DONTNEED)
                return
        ctypes.memset(target, 0, n_bytes)

    def zero_all(self, pieces: Pieces, stream: int = 0) -> None:
        """Fill pieces, rows of (address, bytes), with zeros; unlike `zero`, this gives no pages back."""
        for address, n_bytes in pieces.tolist():
            ctypes.memset(address, 0, n_bytes)

    def close(self) -> None:
        """End the use of the host. Raises `DeviceError` where memory is still allocated, and says how much."""
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
        """Close the device. Where the block has raised an error, memory that is still allocated raises no second."""
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
        if size >= _HUGE_BYTES:
            with suppress(OSError):  # raised by a kernel without huge pages
                memory.madvise(mmap.MADV_HUGEPAGE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        with self._lock:
            self._mappings[address] = _Mapping(memory, size, pinned)
        return address
