"""What the tiers ask of a device."""

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

    Addresses, streams and events are plain numbers. Methods may be called from several threads. Failures
    raise `DeviceError`, and a call that failed has changed nothing, save that a failed copy may have written
    part of its target.

    Work goes to a stream and is done in the stream's order, at some time after the call; streams do not wait
    for each other unless `stream_wait_event` says so. Stream 0 is always there. A device without streams
    (`has_streams`) has stream 0 only, and work is done when the call returns.
    """

    @property
    def name(self) -> str:
        """The device as `open_device` takes it."""

    @property
    def has_streams(self) -> bool:
        """Whether work is queued on streams. Without, it is complete when a call returns."""

    @property
    def has_own_memory(self) -> bool:
        """Whether its memory is apart from the host's. Without, what `alloc` returns is host memory."""

    @property
    def device_bytes(self) -> int:
        """Live bytes of `alloc`, as the allocator rounds them."""

    @property
    def pinned_bytes(self) -> int:
        """Live bytes of `alloc_pinned`, as the allocator rounds them."""

    def free_bytes(self) -> int:
        """Return the bytes of device memory that nobody has taken, as the driver reports them."""

    def allocation_bytes(self, n_bytes: int) -> int:
        """Return what `alloc` takes for `n_bytes`."""

    def pinned_allocation_bytes(self, n_bytes: int) -> int:
        """Return what `alloc_pinned` takes for `n_bytes`."""

    def alloc(self, n_bytes: int) -> int:
        """Return the address of new device memory, zeroed and aligned to a page."""

    def alloc_pinned(self, n_bytes: int) -> int:
        """Return the address of new host memory that `copy_in` reads at full speed, aligned to a page."""

    def free(self, address: int) -> None:
        """Give back what `alloc` or `alloc_pinned` returned; no queued work may still use it."""

    def create_stream(self, *, low_priority: bool = False) -> int:
        """Return a new stream. `DeviceError` on a device without streams."""

    def destroy_stream(self, stream: int) -> None:
        """Give a stream back, once its work is done."""

    def create_event(self) -> int:
        """Return a new event, which counts as done until it is recorded."""

    def destroy_event(self, event: int) -> None:
        """Give an event back."""

    def record_event(self, event: int, stream: int) -> None:
        """Have `event` be done when all work queued on `stream` so far is; replaces an earlier record."""

    def event_done(self, event: int) -> bool:
        """Whether the event's last record has been reached."""

    def wait_event(self, event: int) -> None:
        """Block the calling thread until the event is done."""

    def stream_wait_event(self, stream: int, event: int) -> None:
        """Have work that is queued on `stream` from now wait for the event's record as it is now."""

    def synchronize(self) -> None:
        """Block the calling thread until all queued work is done."""

    def copy_in(self, target: int, source: int, n_bytes: int, stream: int = 0) -> None:
        """Copy from pinned host memory to device memory."""

    def copy_out(self, target: int, source: int, n_bytes: int, stream: int = 0) -> None:
        """Copy from device memory to pinned host memory."""

    def copy_within(self, moves: Moves, stream: int = 0) -> None:
        """Move pieces of device memory: rows of (target, source, bytes), as if one after another.

        A row's target may overlap its own source, and the sources of rows before it.
        """

    def zero(self, target: int, n_bytes: int, stream: int = 0) -> None:
        """Fill device memory with zeros."""

    def close(self) -> None:
        """End the use of the device; `DeviceError` when memory is still allocated."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
