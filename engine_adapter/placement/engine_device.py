"""One of the engine's own devices as the tiers see it: its memory is used through ggml, for any kind of device."""
# ruff: noqa: ARG002 (arguments of the protocol that a device without streams does not use)

from __future__ import annotations

import ctypes as ct
import mmap
import threading
from collections.abc import Callable
from itertools import count, takewhile
from types import TracebackType
from typing import Self

import numpy as np

from expertier.errors import DeviceError
from expertier.hip.device import Device, Moves
from expertier.hip.host import HostDevice
from expertier.hip.zeros import Pieces
from expertier.interrupts import interrupts_deferred
from expertier.units import mib, round_up

_ANY_MEMORY_DOES = -1  # expertier_memory_alloc: any host memory is as good as pinned memory
_NO_MOVES = np.empty((0, 3), np.int64)
_NO_PIECES = np.empty((0, 2), np.int64)


def device_of(proxy: ct.CDLL, name: str) -> Device:
    """Return the device that the tiers use for ggml's device `name`: its own memory, or the host's where it has none.

    Raises:
        DeviceError: the engine has no such device.
    """
    return EngineDevice(proxy, name) if has_own_memory(proxy, name) else HostDevice()


def device_names(proxy: ct.CDLL) -> list[str]:
    """Return the engine's own devices that can run a model, the first of them preferred: GPUs before the CPU."""
    found: list[bytes] = list(takewhile(bool, map(proxy.expertier_proxy_device_name, count())))
    names = [name.decode() for name in found]
    return sorted(names, key=lambda name: not has_own_memory(proxy, name))


def has_own_memory(proxy: ct.CDLL, name: str) -> bool:
    """Whether ggml's device `name` computes on memory of its own. DeviceError: the engine has no such device."""
    is_host: int = proxy.expertier_device_is_host(name.encode())
    if is_host < 0:
        raise DeviceError(
            f"asked for device {name!r}: this engine has {', '.join(device_names(proxy))}; its build decides which"
        )
    return not is_host


class EngineDevice:
    """Memory of a ggml device, and pinned host memory that it copies from. Thread-safe.

    It has no streams here: a copy is complete when the call returns, except for the moves that `relocate` queues, which
    only one thread at a time may do. The plugin queues its own copies on the engine's stream.
    """

    def __init__(self, proxy: ct.CDLL, name: str) -> None:
        """Use device `name` through our proxy library; it must have memory of its own. Nothing is allocated."""
        self._proxy = proxy
        self._ggml_name = name
        self._host = HostDevice()
        self._lock = threading.Lock()
        self._device: dict[int, int] = {}
        self._pinned: dict[int, int] = {}
        self._closed = False
        self._relocating: int | None = None

    @property
    def name(self) -> str:
        """Such as `ggml:CUDA0`."""
        return f"ggml:{self._ggml_name}"

    @property
    def has_streams(self) -> bool:
        """False: a copy is complete when it returns."""
        return False

    @property
    def has_own_memory(self) -> bool:
        """True: a device without memory of its own is the host device instead."""
        return True

    @property
    def device_bytes(self) -> int:
        """Live bytes of `alloc`."""
        with self._lock:
            return sum(self._device.values())

    @property
    def pinned_bytes(self) -> int:
        """Live bytes of `alloc_pinned`, in whole pages."""
        with self._lock:
            return sum(self._pinned.values()) + self._host.pinned_bytes

    def free_bytes(self) -> int:
        """Return what the device reports as free."""
        free, total = ct.c_int64(), ct.c_int64()
        self._proxy.expertier_device_memory(self._ggml_name.encode(), ct.byref(free), ct.byref(total))
        return free.value

    def allocation_bytes(self, n_bytes: int) -> int:
        """Return `n_bytes`, because it is not known here how the device rounds."""
        return n_bytes

    def pinned_allocation_bytes(self, n_bytes: int) -> int:
        """Return `n_bytes` in whole pages."""
        return round_up(n_bytes, mmap.PAGESIZE)

    def alloc(self, n_bytes: int) -> int:
        """Allocate zeroed memory in the device's default buffer type."""
        return self._recorded(lambda: self._alloc(n_bytes, pinned=False), self._device, n_bytes)

    def alloc_pinned(self, n_bytes: int) -> int:
        """Allocate zeroed host memory in the device's host buffer type, or plain memory where it has none."""
        n_bytes = self.pinned_allocation_bytes(n_bytes)
        address = self._recorded(lambda: self._alloc(n_bytes, pinned=True), self._pinned, n_bytes)
        return self._host.alloc_pinned(n_bytes) if address == _ANY_MEMORY_DOES else address

    def free(self, address: int) -> None:
        """Give back what `alloc` or `alloc_pinned` returned."""
        with interrupts_deferred():
            with self._lock:
                known = self._device.pop(address, None) or self._pinned.pop(address, None)
            if known is None:
                self._host.free(address)
            elif not self._proxy.expertier_memory_free(address):
                raise DeviceError(f"free of {address:#x}: the engine knows no allocation that begins there")

    def create_stream(self, *, low_priority: bool = False) -> int:
        """Refuse, because only the engine uses its streams."""
        raise DeviceError(f"asked {self.name} for a stream: its copies are complete when they return")

    def destroy_stream(self, stream: int) -> None:
        """Refuse: there is none."""
        raise DeviceError(f"asked {self.name} to destroy stream {stream}: it has none")

    def create_event(self) -> int:
        """Return 0: every event is done at once."""
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
        """Copy from host memory to the device."""
        self._require(self._proxy.expertier_memory_copy_in(target, source, n_bytes), "copy to", target)

    def copy_out(self, target: int, source: int, n_bytes: int, stream: int = 0) -> None:
        """Copy from the device to host memory."""
        self._require(self._proxy.expertier_memory_copy_out(target, source, n_bytes), "copy from", source)

    def copy_within(self, moves: Moves, stream: int = 0) -> None:
        """Move the pieces, one after another."""
        self.relocate(moves, _NO_PIECES)
        self.finish()

    def zero(self, target: int, n_bytes: int, stream: int = 0) -> None:
        """Fill device memory with zeros."""
        self._require(self._proxy.expertier_memory_zero(target, n_bytes), "zero", target)

    def zero_all(self, pieces: Pieces, stream: int = 0) -> None:
        """Fill pieces of device memory, rows of (address, bytes), with zeros."""
        self.relocate(_NO_MOVES, pieces)
        self.finish()

    def relocate(self, moves: Moves, zeros: Pieces, stream: int = 0) -> None:
        """Queue moves, one after another, and then zeros, all within one allocation; `finish` waits for them."""
        first = [int(rows[0, 0]) for rows in (moves, zeros) if len(rows)]
        if not first:
            return
        rows, pieces = np.ascontiguousarray(moves, np.int64), np.ascontiguousarray(zeros, np.int64)
        self._relocating = first[0]
        self._require(
            self._proxy.expertier_memory_relocate(
                first[0], rows.ctypes.data, len(rows), pieces.ctypes.data, len(pieces)
            ),
            "move or zero",
            first[0],
        )

    def finish(self) -> None:
        """Wait for what `relocate` has queued."""
        slab, self._relocating = self._relocating, None
        if slab is not None:
            self._require(self._proxy.expertier_memory_finish(slab), "wait for", slab)

    def close(self) -> None:
        """End the use; `DeviceError` names what is still allocated."""
        self._closed = True
        if self._device or self._pinned:
            raise DeviceError(
                f"{self.name} closed with {mib(self.device_bytes)} of device and {mib(self.pinned_bytes)} of "
                "pinned memory still allocated: close the TierManager first"
            )
        self._host.close()

    def __enter__(self) -> Self:
        """Return the device itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close; where an exception is being raised already, it takes precedence over an error of closing."""
        if error is None:
            self.close()
        else:
            self._closed = True

    def _recorded(self, alloc: Callable[[], int], sizes: dict[int, int], n_bytes: int) -> int:
        """Allocate, and record the size; when an interrupt comes meanwhile, free the memory again."""
        address = _ANY_MEMORY_DOES
        try:
            with interrupts_deferred():
                address = alloc()
                if address != _ANY_MEMORY_DOES:
                    with self._lock:
                        sizes[address] = n_bytes
            return address
        except BaseException:
            if address != _ANY_MEMORY_DOES:
                self.free(address)
            raise

    def _alloc(self, n_bytes: int, *, pinned: bool) -> int:
        if self._closed:
            raise DeviceError(f"{self.name} was closed: open another one")
        if n_bytes < 1:
            raise ValueError(f"an allocation needs at least one byte, asked for {n_bytes}")
        address: int = self._proxy.expertier_memory_alloc(self._ggml_name.encode(), int(pinned), n_bytes)
        if address == 0:
            kind, variable = (
                ("pinned host memory", "MOE_HOST_POOL_MIB") if pinned else ("memory", "MOE_EXPERT_CACHE_MIB")
            )
            raise DeviceError(
                f"asked {self.name} for {mib(n_bytes)} of {kind} and got none; it reports {mib(self.free_bytes())} "
                f"of its own memory free: lower {variable}, or free some memory"
            )
        return address

    def _require(self, done: int, what: str, address: int) -> None:
        if not done:
            raise DeviceError(
                f"asked {self.name} to {what} {address:#x}: none of its allocations is there, or it gave no stream"
            )
