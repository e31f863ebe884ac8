"""The device and the source between the tiers and what is under test: they fail as planned, and look on."""

from __future__ import annotations

from expertier.hip.device import Device
from expertier.hip.faults.device import FaultyDevice
from expertier.hip.faults.plan import FaultPlan
from expertier.tiers.file.byte_source import ByteSource
from expertier.tiers.file.faulty_source import FaultySource
from expertier.tiers.model.span import Span


class WatchedDevice(FaultyDevice):
    """A device whose calls can fail, and that keeps the most pinned bytes that there ever were."""

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
    """A source whose reads can fail, and that keeps what was read since `take_reads`.

    `bytes_read` are those of all reads that did not fail.
    """

    def __init__(self, inner: ByteSource, plan: FaultPlan) -> None:
        """Wrap `inner`."""
        super().__init__(inner, plan)
        self._reads: list[Span] = []
        self.bytes_read = 0

    def read_into(self, span: Span, buffer: memoryview) -> None:
        """Read, or fail as planned; it counts either way."""
        self._reads.append(span)
        super().read_into(span, buffer)
        self.bytes_read += span.n_bytes

    def take_reads(self) -> list[Span]:
        """Return the spans read since the last call."""
        reads, self._reads = self._reads, []
        return reads
