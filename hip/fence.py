"""Fences: points in a stream's work for which the host or other streams can wait."""

from __future__ import annotations

import threading

from expertier.hip.device import Device


class Fence:
    """A point in a stream's work, made by `Fences.after`. It is reached when all work queued before it is done.

    When the fence is garbage-collected, its event goes back to `Fences`, which uses it again.
    """

    __slots__ = ("_event", "_fences", "_reached")

    def __init__(self, fences: Fences, event: int) -> None:
        """Take over a recorded event."""
        self._fences = fences
        self._event = event
        self._reached = False  # kept once it is True, so that the driver is not asked again

    def done(self) -> bool:
        """Whether the point has been reached."""
        if not self._reached:
            self._reached = self._fences.device.event_done(self._event)
        return self._reached

    def wait(self) -> None:
        """Block the calling thread until the point has been reached."""
        if not self._reached:
            self._fences.device.wait_event(self._event)
            self._reached = True

    def make_wait(self, stream: int) -> None:
        """Have all work that is queued on `stream` after this call wait for the point. The caller does not wait."""
        if not self._reached:
            self._fences.device.stream_wait_event(stream, self._event)

    def __del__(self) -> None:
        """Give the event back."""
        self._fences.keep_event(self._event)


class Fences:
    """Makes fences on a device, and keeps events that are no longer used for later fences. Thread-safe."""

    def __init__(self, device: Device) -> None:
        """Start without events."""
        self.device = device
        self._lock = threading.Lock()
        self._idle: list[int] = []
        self._closed = False

    def after(self, stream: int) -> Fence:
        """Return a fence behind all work that is queued on `stream` now. Raises `DeviceError`."""
        with self._lock:
            event = self._idle.pop() if self._idle else None
        if event is None:
            event = self.device.create_event()
        try:
            self.device.record_event(event, stream)
        except BaseException:
            self.keep_event(event)
            raise
        return Fence(self, event)

    def keep_event(self, event: int) -> None:
        """Keep an event that no fence uses any more, or destroy it after `close`; for `Fence`."""
        with self._lock:
            if not self._closed:
                self._idle.append(event)
                return
        self.device.destroy_event(event)

    def close(self) -> None:
        """Destroy the unused events. The event of a live fence is destroyed when the fence is garbage-collected."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for event in idle:
            self.device.destroy_event(event)
