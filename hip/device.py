"""What the tiers ask of a device."""

from __future__ import annotations

import re
from types import TracebackType
from typing import Protocol, Self, runtime_checkable

from expertier.errors import DeviceError


@runtime_checkable
class Device(Protocol):
    """A device's memory, the host memory that it copies from, and the copy between them.

    Addresses are plain numbers. Methods may be called from several threads. Failures raise `DeviceError`, and
    a call that failed has changed nothing, save that a failed `copy_in` may have written part of its target.
    """

    @property
    def name(self) -> str:
        """The device as `open_device` takes it."""

    @property
    def has_streams(self) -> bool:
        """Whether work is queued on streams. Without, `copy_in` is complete when it returns."""

    @property
    def device_bytes(self) -> int:
        """Live bytes of `alloc`, as the allocator rounds them."""

    @property
    def pinned_bytes(self) -> int:
        """Live bytes of `alloc_pinned`, as the allocator rounds them."""

    def allocation_bytes(self, n_bytes: int) -> int:
        """Return what the allocator takes for `n_bytes`."""

    def alloc(self, n_bytes: int) -> int:
        """Return the address of new device memory, zeroed and aligned to a page."""

    def alloc_pinned(self, n_bytes: int) -> int:
        """Return the address of new host memory that `copy_in` reads at full speed, aligned to a page."""

    def free(self, address: int) -> None:
        """Give back what `alloc` or `alloc_pinned` returned."""

    def copy_in(self, target: int, source: int, n_bytes: int) -> None:
        """Copy from pinned host memory to device memory."""

    def zero(self, target: int, n_bytes: int) -> None:
        """Fill device memory with zeros."""

    def close(self) -> None:
        """End the use of the device; `DeviceError` when memory is still allocated."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def open_device(name: str = "auto") -> Device:
    """Open a device: `auto` (the best that there is), `host`.

    Raises `DeviceError` for a name that is unknown or not available yet.
    """
    from expertier.hip.host import HostDevice

    if name in ("auto", "host"):
        return HostDevice()
    if re.fullmatch(r"(hip|cuda):\d+", name):
        raise DeviceError(f"asked for device {name!r}: GPUs are not available yet; use 'host' or 'auto'")
    raise DeviceError(f"asked for device {name!r}: known are 'auto', 'host', 'hip:N' and 'cuda:N'")
