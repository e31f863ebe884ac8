"""The protocol of a device: what the tiers need from a GPU, or from the host in the place of one."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

Moves: TypeAlias = npt.NDArray[np.int64]
"""Moves within device memory, shape (n, 3): target address, source address, bytes."""


@runtime_checkable
class Device(Protocol):
    """A device's memory, the host memory that it copies from, and the work that it does in queues.

    Addresses, streams and events are plain numbers. Methods may be called from several threads. A call that fails
    raises `DeviceError` and has changed nothing, except that a failed copy may have written part of its target.

    Work is queued on a stream and done in the stream's order, at some time after the call. Streams do not wait for each
    other unless `stream_wait_event` makes them. Stream 0 always exists. A device without streams (`has_streams`) has
    stream 0 only, and its work is done when the call returns.
    """

    @property
    def name(self) -> str:
        """The name under which `open_device` opens the device."""

    @property
    def has_streams(self) -> bool:
        """Whether work is queued on streams. On a device without streams work is complete when a call returns."""

    @property
    def has_own_memory(self) -> bool:
        """Whether the device has memory apart from the host's. If not, `alloc` returns host memory."""

    @property
    def device_bytes(self) -> int:
        """The bytes of `alloc` that were not freed yet, after the allocator's rounding."""

    @property
    def pinned_bytes(self) -> int:
        """The bytes of `alloc_pinned` that were not freed yet, after the allocator's rounding."""

    def free_bytes(self) -> int:
        """Return the bytes of device memory that are free, as the driver reports them."""

    def allocation_bytes(self, n_bytes: int) -> int:
        """Return how many bytes `alloc` takes for `n_bytes`."""

    def pinned_allocation_bytes(self, n_bytes: int) -> int:
        """Return how many bytes `alloc_pinned` takes for `n_bytes`."""

    def alloc(self, n_bytes: int) -> int:
        """Return the address of new device memory, zeroed and aligned to a page."""

    def alloc_pinned(self, n_bytes: int) -> int:
        """Return the address of new host memory that `copy_in` reads at full speed, aligned to a page."""

    def free(self, address: int) -> None:
        """Give memory of `alloc` or `alloc_pinned` back; no queued work may still use it."""

    def create_stream(self, *, low_priority: bool = False) -> int:
        """Return a new stream. Raises `DeviceError` on a device without streams."""

    def destroy_stream(self, stream: int) -> None:
        """Wait for the stream's work, and give the stream back."""

    def create_event(self) -> int:
        """Return a new event, which counts as done until it is recorded."""

    def destroy_event(self, event: int) -> None:
        """Give an event back."""

    def record_event(self, event: int, stream: int) -> None:
        """Record `event` on `stream`: it is done when all work queued there so far is. Replaces an earlier record."""

    def event_done(self, event: int) -> bool:
        """Whether the work before the event's last record is done."""

    def wait_event(self, event: int) -> None:
        """Block the calling thread until the event is done."""

    def stream_wait_event(self, stream: int, event: int) -> None:
        """Have all work that is queued on `stream` after this call wait for the event's present record."""

    def synchronize(self) -> None:
        """Block the calling thread until all queued work is done."""

    def copy_in(self, target: int, source: int, n_bytes: int, stream: int = 0) -> None:
        """Copy from pinned host memory to device memory."""

    def copy_out(self, target: int, source: int, n_bytes: int, stream: int = 0) -> None:
        """Copy from device memory to pinned host memory."""

    def copy_within(self, moves: Moves, stream: int = 0) -> None:
        """Move pieces of device memory, rows of (target, source, bytes), as if they were done one after another.

        A row's target may overlap its own source, and the sources of earlier rows.
        """

    def zero(self, target: int, n_bytes: int, stream: int = 0) -> None:
        """Fill device memory with zeros."""

    def close(self) -> None:
        """End the use of the device. Raises `DeviceError` where memory is still allocated."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
