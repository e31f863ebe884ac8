"""Wrappers of the device and the source under test: their calls fail as planned, and are recorded."""

from __future__ import annotations

from expertier.hip.device import Device
from expertier.hip.faults.device import FaultyDevice
from expertier.hip.faults.plan import FaultPlan
from expertier.tiers.file.byte_source import ByteSource
from expertier.tiers.file.faulty_source import FaultySource
from expertier.tiers.model.span import Span


class WatchedDevice(FaultyDevice):
    """A device whose calls can fail, and that records the highest number of pinned bytes."""

    def __init__(self, inner: Device, plan: FaultPlan) -> None:
        """Wrap `inner`."""
        super().__init__(inner, plan)
        self.peak_pinned_bytes = 0

    def alloc_pinned(self, n_bytes: int) -> int:
        """Allocate, or fail as planned."""
        address = super().alloc_pinned(n_bytes)
        self.peak_pinned_bytes = max(self.peak_pinned_bytes, self.pinned_bytes)
        return address


class WatchedSource(FaultySource):
    """A source whose reads can fail, and that records the spans read since the last call of `take_reads`.

    `bytes_read` counts the bytes of all reads that did not fail.
    """

    def __init__(self, inner: ByteSource, plan: FaultPlan) -> None:
        """Wrap `inner`."""
        super().__init__(inner, plan)
        self._reads: list[Span] = []
        self.bytes_read = 0

    def read_into(self, span: Span, buffer: memoryview) -> None:
        """Read, or fail as planned; the read is recorded in both cases."""
        self._reads.append(span)
        super().read_into(span, buffer)
        self.bytes_read += span.n_bytes

    def take_reads(self) -> list[Span]:
        """Return the spans read since the last call."""
        reads, self._reads = self._reads, []
        return reads
