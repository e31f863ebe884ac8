"""A device whose calls fail where a `FaultPlan` says so."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from expertier.errors import DeviceError
from expertier.hip.device import Device, Moves
from expertier.hip.faults.plan import FaultPlan


class FaultyDevice:
    """A device that passes calls to `inner` and makes some of them fail, as `plan` says.

    The plan's operations have the names of the methods. A planned failure of a copy comes after half of its work, as if
    the copy had been interrupted; other operations that fail change nothing. Methods that clean-up needs (`free`,
    `destroy_*`, `wait_event`, `synchronize`) never fail by plan.
    """

    def __init__(self, inner: Device, plan: FaultPlan) -> None:
        """Wrap `inner`; nothing fails before `plan` is armed."""
        self._inner = inner
        self._plan = plan

    @property
    def name(self) -> str:
        """The inner device's name."""
        return self._inner.name

    @property
    def has_streams(self) -> bool:
        """Whether the inner device has streams."""
        return self._inner.has_streams

    @property
    def has_own_memory(self) -> bool:
        """Whether the inner device's memory is its own."""
        return self._inner.has_own_memory

    @property
    def device_bytes(self) -> int:
        """The inner device's `device_bytes`."""
        return self._inner.device_bytes

    @property
    def pinned_bytes(self) -> int:
        """The inner device's `pinned_bytes`."""
        return self._inner.pinned_bytes

    def free_bytes(self) -> int:
        """Return the inner device's free bytes."""
        return self._inner.free_bytes()

    def allocation_bytes(self, n_bytes: int) -> int:
        """Return what the inner allocator takes."""
        return self._inner.allocation_bytes(n_bytes)

    def pinned_allocation_bytes(self, n_bytes: int) -> int:
        """Return what the inner allocator takes."""
        return self._inner.pinned_allocation_bytes(n_bytes)

    def alloc(self, n_bytes: int) -> int:
        """Allocate, or fail."""
        self._plan.check("alloc", DeviceError)
        return self._inner.alloc(n_bytes)

    def alloc_pinned(self, n_bytes: int) -> int:
        """Allocate pinned memory, or fail."""
        self._plan.check("alloc_pinned", DeviceError)
        return self._inner.alloc_pinned(n_bytes)

    def free(self, address: int) -> None:
        """Free; never fails by plan, so that clean-up works."""
        self._inner.free(address)

    def create_stream(self, *, low_priority: bool = False) -> int:
        """Create a stream, or fail."""
        self._plan.check("create_stream", DeviceError)
        return self._inner.create_stream(low_priority=low_priority)

    def destroy_stream(self, stream: int) -> None:
        """Destroy; never fails by plan."""
        self._inner.destroy_stream(stream)

    def create_event(self) -> int:
        """Create an event, or fail."""
        self._plan.check("create_event", DeviceError)
        return self._inner.create_event()

    def destroy_event(self, event: int) -> None:
        """Destroy; never fails by plan."""
        self._inner.destroy_event(event)

    def record_event(self, event: int, stream: int) -> None:
        """Record, or fail."""
        self._plan.check("record_event", DeviceError)
        self._inner.record_event(event, stream)

    def event_done(self, event: int) -> bool:
        """Ask the inner device."""
        return self._inner.event_done(event)

    def wait_event(self, event: int) -> None:
        """Wait; never fails by plan, so that clean-up works."""
        self._inner.wait_event(event)

    def stream_wait_event(self, stream: int, event: int) -> None:
        """Have a stream wait, or fail."""
        self._plan.check("stream_wait_event", DeviceError)
        self._inner.stream_wait_event(stream, event)

    def synchronize(self) -> None:
        """Wait; never fails by plan, so that clean-up works."""
        self._inner.synchronize()

    def copy_in(self, target: int, source: int, n_bytes: int, stream: int = 0) -> None:
        """Copy, or copy half and fail."""
        error = self._plan.error_for("copy_in", DeviceError)
        if error is not None:
            self._inner.copy_in(target, source, n_bytes // 2, stream)
            raise error
        self._inner.copy_in(target, source, n_bytes, stream)

    def copy_out(self, target: int, source: int, n_bytes: int, stream: int = 0) -> None:
        """Copy, or copy half and fail."""
        error = self._plan.error_for("copy_out", DeviceError)
        if error is not None:
            self._inner.copy_out(target, source, n_bytes // 2, stream)
            raise error
        self._inner.copy_out(target, source, n_bytes, stream)

    def copy_within(self, moves: Moves, stream: int = 0) -> None:
        """Move, or do half of the moves and fail."""
        error = self._plan.error_for("copy_within", DeviceError)
        if error is not None:
            self._inner.copy_within(moves[: len(moves) // 2], stream)
            raise error
        self._inner.copy_within(moves, stream)

    def zero(self, target: int, n_bytes: int, stream: int = 0) -> None:
        """Fill with zeros, or fail."""
        self._plan.check("zero", DeviceError)
        self._inner.zero(target, n_bytes, stream)

    def close(self) -> None:
        """Close the inner device."""
        self._inner.close()

    def __enter__(self) -> Self:
        """Return the wrapper itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the inner device."""
        self._inner.__exit__(kind, error, trace)
