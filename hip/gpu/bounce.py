"""Copies to a device from memory that is not pinned, through a pinned block."""

from __future__ import annotations

import ctypes
from types import TracebackType
from typing import Self

from expertier.errors import DeviceError
from expertier.hip.device import Device
from expertier.units import MIB

_HALVES = 2


class Bounce:
    """A pinned block in two halves: while one half is filled from pageable memory, the device copies from the other.

    Drivers copy from pageable memory synchronously at best, and ROCm is very slow or hangs on mapped file pages. Not
    thread-safe. The block counts in the device's `pinned_bytes`.
    """

    def __init__(self, device: Device, n_bytes: int = 8 * MIB) -> None:
        """Take `n_bytes` of pinned memory. Raises `DeviceError`."""
        self._device = device
        self._half_bytes = n_bytes // _HALVES
        if self._half_bytes < 1:
            raise ValueError(f"a bounce block of {n_bytes} bytes has no two halves: give at least 2 bytes")
        self._events: list[int] = []
        self._next = 0
        self._block = device.alloc_pinned(n_bytes)
        try:
            for _ in range(_HALVES):
                self._events.append(device.create_event())
        except BaseException:
            self.close()
            raise

    def copy_in(self, target: int, source: int, n_bytes: int, stream: int = 0) -> None:
        """Copy from any readable memory, which may be changed after this returns. Raises `DeviceError`.

        The call waits for the stream only where it needs a half from which a copy is still queued.
        """
        done = 0
        while done < n_bytes:
            half, self._next = self._next, (self._next + 1) % _HALVES
            size = min(self._half_bytes, n_bytes - done)
            place = self._block + half * self._half_bytes
            self._device.wait_event(self._events[half])
            ctypes.memmove(place, source + done, size)
            self._device.copy_in(target + done, place, size, stream)
            try:
                self._device.record_event(self._events[half], stream)
            except DeviceError:
                self._device.synchronize()  # without the event, the half could be filled again too early
            done += size

    def close(self) -> None:
        """Wait for the copies, and give the block back. A second call does nothing."""
        events, self._events = self._events, []
        for event in events:
            self._device.wait_event(event)
            self._device.destroy_event(event)
        block, self._block = self._block, 0
        if block:
            self._device.free(block)

    def __enter__(self) -> Self:
        """Return the object itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the object."""
        self.close()
