"""A device whose calls fail where a plan says so."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from expertier.errors import DeviceError
from expertier.hip.device import Device
from expertier.hip.fault_plan import FaultPlan


class FaultyDevice:
    """A device around `inner`: the operations `alloc`, `alloc_pinned`, `copy_in` and `zero` fail as planned.

    A failing copy first writes half of its bytes, as an interrupted one would; the others change nothing.
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
    def device_bytes(self) -> int:
        """The inner device's live bytes."""
        return self._inner.device_bytes

    @property
    def pinned_bytes(self) -> int:
        """The inner device's live pinned bytes."""
        return self._inner.pinned_bytes

    def allocation_bytes(self, n_bytes: int) -> int:
        """Return what the inner allocator takes."""
        return self._inner.allocation_bytes(n_bytes)

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

    def copy_in(self, target: int, source: int, n_bytes: int) -> None:
        """Copy, or copy half and fail."""
        error = self._plan.error_for("copy_in", DeviceError)
        if error is not None:
            self._inner.copy_in(target, source, n_bytes // 2)
            raise error
        self._inner.copy_in(target, source, n_bytes)

    def zero(self, target: int, n_bytes: int) -> None:
        """Fill with zeros, or fail."""
        self._plan.check("zero", DeviceError)
        self._inner.zero(target, n_bytes)

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
