"""A byte source whose reads fail where a plan says so."""

from __future__ import annotations

from expertier.errors import SourceError
from expertier.hip.fault_plan import FaultPlan
from expertier.tiers.byte_source import ByteSource


class FaultySource:
    """A `ByteSource` around `inner`: the operation `read` fails as planned, after half of the bytes came."""

    def __init__(self, inner: ByteSource, plan: FaultPlan) -> None:
        """Wrap `inner`; nothing fails before `plan` is armed."""
        self._inner = inner
        self._plan = plan

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Read, or read half and fail."""
        error = self._plan.error_for("read", SourceError)
        if error is not None:
            self._inner.read_into(offset, buffer[: len(buffer) // 2])
            raise error
        self._inner.read_into(offset, buffer)
