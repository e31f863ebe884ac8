"""The methods that an integrator overrides to run the machine on a device, tiers or an engine of their own."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from expertier.hip.device import Device
from expertier.testing.fake_device import FakeDevice
from expertier.testing.pattern_source import PatternSource
from expertier.testing.synthetic_table import LayerShape, synthetic_table
from expertier.testing.tier_machine.engine_calls import EngineCalls, TableEngine
from expertier.tiers.config.config import TierConfig
from expertier.tiers.file.byte_source import ByteSource
from expertier.tiers.manager import TierManager
from expertier.tiers.model.table import ExpertTable


@dataclass(frozen=True, slots=True)
class Read:
    """Bytes of device memory that a queued reader will find: `expected` at `address`, if all is well."""

    address: int
    expected: bytes
    what: str


Seen = Callable[[Read, bytes], None]
"""Called with a read and the bytes found, at any time before the streams are next found idle."""


class TierHooks:
    """The machine's surroundings; every method has a default that needs no hardware.

    `device` is the device that `make_device` returned, and `streams` are the streams that `make_streams` returned. A
    device without streams has none: there work is done when a call returns, and `stream` is None below.
    """

    device: Device
    streams: tuple[int, ...]

    # ---- what is tested

    def make_device(self) -> Device:
        """Return the device under test, without allocations. By default a `FakeDevice`."""
        return FakeDevice()

    def make_table(self) -> ExpertTable:
        """Return the experts: by default three layers of three slot sizes, one layer with an array for each matrix."""
        return _default_table()

    def make_source(self) -> PatternSource:
        """Return the source of the experts' bytes; its `expected` returns the right bytes."""
        return PatternSource()

    def make_tiers(
        self, table: ExpertTable, device: Device, source: ByteSource, config: TierConfig
    ) -> TierManager:
        """Return the manager under test. `device` and `source` are wrapped so that their calls can fail."""
        return TierManager(table, device=device, source=source, config=config)

    def open_engine(self, tiers: TierManager) -> EngineCalls:
        """Return the engine under test, after `engine.bind`. By default `TableEngine`, which calls from Python."""
        return TableEngine(tiers)

    # ---- how work is queued on the device, and how memory is read

    def make_streams(self) -> tuple[int, ...]:
        """Return the compute streams: stream 0 and a new one. They are destroyed by `close_streams`."""
        return (0, self.device.create_stream()) if self.device.has_streams else ()

    def close_streams(self) -> None:
        """Destroy the compute streams; their work is done."""
        for stream in self.streams[1:]:
            self.device.destroy_stream(stream)

    def launch_read(self, stream: int | None, reads: Sequence[Read], seen: Seen) -> None:
        """Queue a kernel that reads memory when it runs, and tells `seen` what it found.

        By default this queues a function in a `FakeDevice`'s stream. On any other device it waits for the stream and
        then reads, which is correct but cannot reveal a reader that comes too early.
        """

        def kernel() -> None:
            for read in reads:
                seen(read, self.read_memory(read.address, len(read.expected)))

        self._launch(stream, kernel)

    def launch_write(self, stream: int | None, address: int, n_bytes: int, value: int) -> None:
        """Queue a kernel that fills memory with a byte when it runs."""
        self._launch(stream, lambda: self.write_memory(address, n_bytes, value))

    def read_memory(self, address: int, n_bytes: int) -> bytes:
        """Return device memory as it is now. By default it is read as memory of this process."""
        return ctypes.string_at(address, n_bytes)

    def write_memory(self, address: int, n_bytes: int, value: int) -> None:
        """Fill device memory now."""
        ctypes.memset(address, value, n_bytes)

    def advance(self, stream: int, n: int) -> None:
        """Let a stream run up to `n` pieces of its work, where the device can do that, as a `FakeDevice` can."""
        if isinstance(self.device, FakeDevice):
            self.device.advance(stream, n)

    def all_streams(self) -> tuple[int, ...]:
        """Return all streams that `advance` knows, including those of the tiers."""
        return self.device.streams if isinstance(self.device, FakeDevice) else ()

    def is_idle(self) -> bool:
        """Whether no stream has work left; a device that cannot tell waits for all work and returns True."""
        if isinstance(self.device, FakeDevice):
            return not any(self.device.queued(stream) for stream in self.device.streams)
        self.device.synchronize()
        return True

    def _launch(self, stream: int | None, kernel: Callable[[], None]) -> None:
        if stream is None:
            kernel()
        elif isinstance(self.device, FakeDevice):
            self.device.launch(kernel, stream)
        else:
            event = self.device.create_event()
            try:
                self.device.record_event(event, stream)
                self.device.wait_event(event)
                kernel()
            finally:
                self.device.destroy_event(event)


@cache
def _default_table() -> ExpertTable:
    return synthetic_table(
        [
            LayerShape(n_experts=8),
            LayerShape(n_experts=6, types=("Q4_0", "Q4_0", "Q8_0")),  # an array for each matrix
            LayerShape(n_experts=8, n_ff=64),
        ]
    )
