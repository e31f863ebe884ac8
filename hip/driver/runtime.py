"""Streams and events with an owner that gives them back."""

from __future__ import annotations

import ctypes

from expertier.hip.driver.gpu import Gpu
from expertier.hip.driver.ownership import Owned
from expertier.hip.driver.stream_handle import StreamLike, stream_handle

_NON_BLOCKING = 0x1  # the stream does not wait for stream 0, nor stream 0 for the stream


class Stream(Owned):
    """A queue of work on a GPU. Its work is done in order and waits for no other stream unless told to."""

    def __init__(self, gpu: Gpu, *, low_priority: bool = False) -> None:
        """Create the stream, with the GPU's lowest or default priority. Raises `DriverError`."""
        self.gpu = gpu
        priority = 0
        if low_priority:
            least, greatest = ctypes.c_int(), ctypes.c_int()
            gpu.call("priority_range", ctypes.byref(least), ctypes.byref(greatest))
            priority = least.value
        self.handle = gpu.handle("stream_create", _NON_BLOCKING, priority)
        self._closed = False

    @property
    def ptr(self) -> int:
        """The driver's handle, under the name that CuPy uses."""
        return self.handle

    def synchronize(self) -> None:
        """Wait for the stream's work. Raises `DriverError`, also for work that failed."""
        self.gpu.call("stream_synchronize", self.handle)

    def done(self) -> bool:
        """Whether all queued work is done."""
        return self.gpu.ask("stream_query", self.handle)

    def wait(self, event: Event) -> None:
        """Have all work that is queued on the stream after this call wait for the event."""
        self.gpu.call("stream_wait_event", self.handle, event.handle, 0)

    def _release(self) -> None:
        self.gpu.call("stream_destroy", self.handle)

    def __repr__(self) -> str:
        """Name the stream for a message."""
        return f"Stream({self.gpu.name}, {self.handle:#x})"


class Event(Owned):
    """A point in a stream's work; an event that was never recorded counts as done."""

    def __init__(self, gpu: Gpu) -> None:
        """Create the event. Raises `DriverError`."""
        self.gpu = gpu
        self.handle = gpu.new_event()
        self._closed = False

    def record(self, stream: StreamLike = 0) -> None:
        """Record the event: it is done when all work that is queued on the stream so far is done."""
        self.gpu.call("event_record", self.handle, stream_handle(stream))

    def done(self) -> bool:
        """Whether the work before the last record is done."""
        return self.gpu.ask("event_query", self.handle)

    def synchronize(self) -> None:
        """Wait until the work before the last record is done."""
        self.gpu.call("event_synchronize", self.handle)

    def _release(self) -> None:
        self.gpu.call("event_destroy", self.handle)

    def __repr__(self) -> str:
        """Name the event for a message."""
        return f"Event({self.gpu.name}, {self.handle:#x})"
