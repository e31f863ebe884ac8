"""The tiers' state machine on a GPU: real, or the fake driver's.

Readers are copies on the reader's stream, looked at once they are done. Every second one is behind a kernel that takes
its time: a slot that is overwritten too early shows in what these find, and one that is filled too late in what the
others find. Device memory is looked at through pinned memory, which
no device counts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from expertier.hip.driver.libraries import load_compiler
from expertier.hip.driver.memory import DeviceBuffer, PinnedBuffer
from expertier.hip.driver.runtime import Stream
from expertier.hip.gpu.device import GpuDevice
from expertier.hip.kernels.cache import compiled
from expertier.hip.kernels.compiler import RuntimeCompiler
from expertier.hip.kernels.module import KernelModule
from expertier.testing.tier_machine import Read, Seen, TierMachine

SPIN = """
extern "C" __global__ void spin(unsigned int steps, unsigned int* out) {
    unsigned int x = steps;
    for (unsigned int i = 0; i < steps; i++) x = x * 1664525u + 1013904223u;
    *out = x;
}
"""
_WAIT_EVERY = 3
_SLOW_EVERY = 2


@dataclass(slots=True)
class _Queued:
    """A reader that may not have read yet."""

    event: int
    found: PinnedBuffer
    reads: Sequence[Read]
    seen: Seen


class GpuTierMachine(TierMachine):
    """Run `on(...)`'s result."""

    device: GpuDevice
    spin_steps = 0

    @staticmethod
    def open_gpu() -> GpuDevice:
        """Return a new device with nothing on it."""
        raise NotImplementedError

    @classmethod
    def on(cls, open_gpu: Callable[[], GpuDevice], *, spin_steps: int) -> type[GpuTierMachine]:
        """Return the machine for the devices that `open_gpu` opens; a reader waits for `spin_steps` of a loop."""
        members = {"open_gpu": staticmethod(open_gpu), "spin_steps": spin_steps}
        return type("GpuTierMachine", (cls,), members)

    # ---- hooks

    def make_device(self) -> GpuDevice:
        device = self.open_gpu()
        gpu = device.gpu
        compiler = RuntimeCompiler(gpu.driver.vendor, load_compiler(gpu.driver.vendor, gpu.driver.library))
        self.module = KernelModule(gpu, compiled(compiler, SPIN, gpu.architecture()))
        self.spin = self.module.function("spin")
        self.spun = DeviceBuffer(gpu, 4)
        self.looking = Stream(gpu)
        self.glass = PinnedBuffer(gpu, 1 << 16)
        self.queued: list[_Queued] = []
        self.n_asked = self.n_readers = 0
        return device

    def close_streams(self) -> None:
        self._hear(wait=True)
        super().close_streams()
        for owned in (self.looking, self.glass, self.spun, self.module):
            owned.close()

    def launch_read(self, stream: int | None, reads: Sequence[Read], seen: Seen) -> None:
        if stream is None:
            self.read_now(reads)
            return
        self.n_readers += 1
        if self.n_readers % _SLOW_EVERY == 0:
            steps = (ctypes.c_uint(self.spin_steps), ctypes.c_void_p(self.spun.address))
            self.spin.launch((1, 1), 1, steps, stream)
        found = PinnedBuffer(self.device.gpu, max(1, sum(len(read.expected) for read in reads)))
        at = found.address
        for read in reads:
            self.device.copy_out(at, read.address, len(read.expected), stream)
            at += len(read.expected)
        event = self.device.create_event()
        self.device.record_event(event, stream)
        self.queued.append(_Queued(event, found, reads, seen))

    def launch_write(self, stream: int | None, address: int, n_bytes: int, value: int) -> None:
        on = self.looking.handle if stream is None else stream
        self.device.gpu.call("fill", address, value, n_bytes, on)
        if stream is None:
            self.looking.synchronize()

    def read_memory(self, address: int, n_bytes: int) -> bytes:
        if n_bytes > self.glass.n_bytes:
            self.glass.close()
            self.glass = PinnedBuffer(self.device.gpu, n_bytes)
        self.device.copy_out(self.glass.address, address, n_bytes, self.looking)
        self.looking.synchronize()
        return ctypes.string_at(self.glass.address, n_bytes)

    def all_streams(self) -> tuple[int, ...]:
        return (0, *self.device._streams)

    def advance(self, stream: int, n: int) -> None:
        del n
        self.device.gpu.call("stream_synchronize", stream)

    def is_idle(self) -> bool:
        """Now and then after a wait, so that all slots are looked at while others see work in the queues."""
        self.n_asked += 1
        if self.n_asked % _WAIT_EVERY == 0:
            self.device.synchronize()
        idle = all(self.device.gpu.ask("stream_query", stream) for stream in self.all_streams())
        self._hear(wait=False)
        return idle

    # ---- inside

    def _hear(self, *, wait: bool) -> None:
        """Tell what the readers found that have read."""
        still = []
        for queued in self.queued:
            if wait:
                self.device.wait_event(queued.event)
            elif not self.device.event_done(queued.event):
                still.append(queued)
                continue
            at = queued.found.address
            for read in queued.reads:
                queued.seen(read, ctypes.string_at(at, len(read.expected)))
                at += len(read.expected)
            self.device.destroy_event(queued.event)
            queued.found.close()
        self.queued = still
