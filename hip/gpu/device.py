"""A GPU as a device, HIP or CUDA."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn, Self, TypeVar

import numpy as np

from expertier.errors import DeviceError
from expertier.hip.device import Moves
from expertier.hip.driver.allocator import Allocation, Allocator, DriverAllocator
from expertier.hip.driver.gpu import Gpu
from expertier.hip.driver.memory import PAGE_BYTES, PinnedBuffer, pinned_cost
from expertier.hip.driver.ownership import Owned
from expertier.hip.driver.runtime import Event, Stream
from expertier.hip.driver.stream_handle import StreamLike, stream_handle
from expertier.hip.gpu.copy_choice import MOST_BYTES, CopyChoice, measure_copies
from expertier.hip.gpu.moves.mover import Mover
from expertier.hip.zeros import Pieces
from expertier.interrupts import completing, handing_over
from expertier.units import MIB, mib, round_up

if TYPE_CHECKING:
    from expertier.hip.gpu.moves.copy_loop import CopyLoop

_T = TypeVar("_T", bound=Owned)

ALLOCATION_BYTES = 2 * MIB
"""Device memory is taken in multiples of this: drivers round up to it, so the counted bytes are those taken."""


class GpuDevice:
    """A GPU as a `Device`, which documents the methods: its memory, pinned host memory, and work on streams.

    A stream may be a number that `create_stream` returned, a stream of the engine, or an object that has the number in
    `ptr`, such as CuPy's. Copies from or to host memory that is not pinned are refused, because drivers do them late,
    slowly or never; `bounce.py` copies from such memory.
    """

    def __init__(
        self,
        gpu: Gpu,
        *,
        allocator: Allocator | None = None,
        kernels: bool = True,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        """Use `gpu`, which `close` closes, too. Raises `DeviceError`.

        `allocator` gives device memory; by default the driver does. Without `kernels`, moves are done by the driver's
        copies.
        """
        self.gpu = gpu
        self._allocator = allocator or DriverAllocator(gpu)
        self._lock = threading.Lock()
        self._memory: dict[int, Allocation] = {}
        self._pinned: dict[int, PinnedBuffer] = {}
        self._streams: dict[int, Stream] = {}
        self._events: dict[int, Event] = {}
        self._choice: CopyChoice | None = None
        self._copy_loop: CopyLoop | None = None
        self._closed = False
        self.mover = Mover(gpu, kernels=kernels, environ=environ)
        try:
            self._clearing = Stream(gpu)
        except BaseException:
            self.mover.close()
            raise

    @property
    def name(self) -> str:
        """The device's name, such as `hip:0` or `cuda:1`."""
        return self.gpu.name

    @property
    def has_streams(self) -> bool:
        """True: work is queued."""
        return True

    @property
    def has_own_memory(self) -> bool:
        """True: the memory is the GPU's."""
        return True

    @property
    def device_bytes(self) -> int:
        """The bytes of `alloc` that were not freed yet, without the device's own `overhead_bytes`."""
        with self._lock:
            return sum(memory.n_bytes for memory in self._memory.values())

    @property
    def pinned_bytes(self) -> int:
        """What pinned memory takes from the host until it is freed, as `pinned_allocation_bytes` computes it."""
        with self._lock:
            return sum(pinned_cost(buffer.n_bytes) for buffer in self._pinned.values())

    @property
    def overhead_bytes(self) -> int:
        """The bytes of device memory that this object takes for moves."""
        return self.mover.overhead_bytes

    def free_bytes(self) -> int:
        """Return the free device memory that the driver reports."""
        return self.gpu.memory()[0]

    def allocation_bytes(self, n_bytes: int) -> int:
        """Return `n_bytes` rounded up to a multiple of 2 MiB."""
        return round_up(n_bytes, ALLOCATION_BYTES)

    def pinned_allocation_bytes(self, n_bytes: int) -> int:
        """Return how many bytes pinned memory of `n_bytes` takes from the host (`memory.pinned_cost`)."""
        return pinned_cost(n_bytes)

    @handing_over(lambda address, self, *_: self.free(address))
    def alloc(self, n_bytes: int) -> int:
        """Return the address of zeroed device memory."""
        self._check_can_allocate(n_bytes)
        memory = self._allocator.allocate(self.allocation_bytes(n_bytes))
        try:
            if memory.address % PAGE_BYTES:
                raise DeviceError(f"{self.name} gave memory at {memory.address:#x}, not aligned to a page")
            self.gpu.call("fill", memory.address, 0, memory.n_bytes, self._clearing.handle)
            self._clearing.synchronize()
        except BaseException:
            memory.close()
            raise
        with self._lock:
            self._memory[memory.address] = memory
        return memory.address

    @handing_over(lambda address, self, *_: self.free(address))
    def alloc_pinned(self, n_bytes: int) -> int:
        """Return the address of pinned host memory."""
        self._check_can_allocate(n_bytes)
        buffer = PinnedBuffer(self.gpu, round_up(n_bytes, PAGE_BYTES))
        with self._lock:
            self._pinned[buffer.address] = buffer
        return buffer.address

    @completing
    def free(self, address: int) -> None:
        """Give memory of `alloc`, `alloc_pinned` or `keep` back."""
        with self._lock:
            memory = self._memory.pop(address, None) or self._pinned.pop(address, None)
        if memory is None:
            raise DeviceError(f"free of {address:#x}: no live allocation of this device begins there")
        memory.close()

    def keep(self, memory: Allocation) -> None:
        """Count memory of this GPU that another object allocated, until `free` of its address closes it."""
        with self._lock:
            self._memory[memory.address] = memory

    @handing_over(lambda stream, self, *_: self.destroy_stream(stream))
    def create_stream(self, *, low_priority: bool = False) -> int:
        """Return a new stream, which does not wait for stream 0."""
        stream = Stream(self.gpu, low_priority=low_priority)
        with self._lock:
            self._streams[stream.handle] = stream
        return stream.handle

    @completing
    def destroy_stream(self, stream: int) -> None:
        """Wait for the stream's work and give it back."""
        owned = self._take(self._streams, stream, "stream")
        try:
            owned.synchronize()
        finally:
            owned.close()

    @handing_over(lambda event, self, *_: self.destroy_event(event))
    def create_event(self) -> int:
        """Return a new event."""
        event = Event(self.gpu)
        with self._lock:
            self._events[event.handle] = event
        return event.handle

    @completing
    def destroy_event(self, event: int) -> None:
        """Give an event back."""
        if not self._closed:  # `close` has destroyed all events
            self._take(self._events, event, "event").close()

    def record_event(self, event: int, stream: StreamLike) -> None:
        """Record an event on a stream."""
        self.gpu.call("event_record", event, stream_handle(stream))

    def event_done(self, event: int) -> bool:
        """Ask the driver whether an event is done. Raises `DriverError` where the work before the event failed."""
        return self.gpu.ask("event_query", event)

    def wait_event(self, event: int) -> None:
        """Wait for an event, with Python's lock released."""
        self.gpu.call("event_synchronize", event)

    def stream_wait_event(self, stream: StreamLike, event: int) -> None:
        """Have a stream wait for an event."""
        self.gpu.call("stream_wait_event", stream_handle(stream), event, 0)

    def synchronize(self) -> None:
        """Wait for all work of this process on the GPU, also work of the engine and other libraries."""
        self.gpu.synchronize()

    def copy_in(self, target: int, source: int, n_bytes: int, stream: StreamLike = 0) -> None:
        """Queue a copy. Raises `DeviceError` where the source is not pinned."""
        self._check_pinned(source, n_bytes, "from")
        self.gpu.call("copy_in", target, source, n_bytes, stream_handle(stream))

    def copy_in_many(self, moves: Moves, stream: StreamLike = 0) -> None:
        """Queue copies of many pieces, rows of (target, pinned source, bytes); targets must not overlap.

        They are one launch of a kernel or a copy for each piece, whichever `warm_up` has found to be faster. Without
        `warm_up` they are copies.
        """
        pieces = moves[:, 1:].tolist()
        if not all(n_bytes for _, n_bytes in pieces):
            moves = moves[moves[:, 2] > 0]
            pieces = moves[:, 1:].tolist()
        if not pieces:
            return
        stranger = self.gpu.driver.pinned.stranger(pieces)
        if stranger is not None:
            self._refuse_unpinned(*stranger, "from")
        if self._choice is not None and self._choice.gather_is_faster(len(moves), int(moves[:, 2].mean())):
            self.mover.gather(moves, stream_handle(stream))
        else:
            self._copies(moves, stream_handle(stream))

    def prepare_copies(self) -> None:
        """Compile the loop that queues copies."""
        self._compile_copies()

    def copy_out(self, target: int, source: int, n_bytes: int, stream: StreamLike = 0) -> None:
        """Queue a copy. Raises `DeviceError` where the target is not pinned."""
        self._check_pinned(target, n_bytes, "to")
        self.gpu.call("copy_out", target, source, n_bytes, stream_handle(stream))

    def copy_within(self, moves: Moves, stream: StreamLike = 0) -> None:
        """Queue moves, in as few launches as their overlaps allow."""
        self.mover.move(moves, stream_handle(stream))

    def zero(self, target: int, n_bytes: int, stream: StreamLike = 0) -> None:
        """Queue a fill with zeros."""
        self.gpu.call("fill", target, 0, n_bytes, stream_handle(stream))

    def zero_all(self, pieces: Pieces, stream: StreamLike = 0) -> None:
        """Queue zeroing of many small pieces, rows of (address, bytes), in one launch."""
        self.mover.zero(pieces, stream_handle(stream))

    def warm_up(self, most_bytes: int = MOST_BYTES) -> CopyChoice | None:
        """Measure whether a kernel or copies bring experts in faster, for up to `most_bytes` at once.

        Returns the measurements, which `copy_in_many` goes by from then on; None where there are no kernels. To be
        called once, at the start. Raises `DriverError`.
        """
        if self.mover.kernels and self._host_addresses_are_shared():
            self._choice = measure_copies(self.gpu, self.mover, self._copies, most_bytes)
        return self._choice

    @completing
    def close(self) -> None:
        """Wait for all work and end the use of the GPU. Raises `DeviceError` where memory is still allocated."""
        left = self._end()
        if left:
            raise DeviceError(left)

    def __enter__(self) -> Self:
        """Return the device itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the device. Where the block has raised an error, memory that is still allocated raises no second."""
        if error is None:
            self.close()
        else:
            self._end()

    def _end(self) -> str:
        """Close the device, once. Return a message where memory is left, which stays usable until it is freed."""
        with self._lock:
            was_closed, self._closed = self._closed, True
            n_left = len(self._memory) + len(self._pinned)
            idle: list[Owned] = [*self._streams.values(), *self._events.values()]
            self._streams, self._events = {}, {}
        # All of them are closed even where one fails; then the first error is raised.
        closers: list[Callable[[], None]] = []
        if not was_closed:
            closers += [self.gpu.synchronize, *(owned.close for owned in idle)]
            closers += [self._clearing.close, self.mover.close]
        if not n_left:
            closers.append(self.gpu.close)
        _run_all(closers)
        if n_left:
            return (
                f"{self.name} closed with {n_left} allocations still live: {mib(self.device_bytes)} of device "
                f"and {mib(self.pinned_bytes)} of pinned memory; close the TierManager first"
            )
        return ""

    def _copies(self, moves: Moves, stream: int) -> None:
        copies = np.ascontiguousarray(moves, np.int64)
        loop, address = self._copy_loop or self._compile_copies(), self.gpu.driver.address("copy_in")
        code = self.gpu.within(loop, address, copies, stream)
        if code:
            raise self.gpu.driver.error("copy_in", code)

    def _compile_copies(self) -> CopyLoop:
        from expertier.hip.gpu.moves.copy_loop import copy_loop  # imports Numba, so it comes late

        self._copy_loop = copy_loop()
        return self._copy_loop

    def _check_can_allocate(self, n_bytes: int) -> None:
        if self._closed:
            raise DeviceError(f"{self.name} was closed: open it again")
        if n_bytes < 1:
            raise ValueError(f"an allocation needs at least one byte, asked for {n_bytes}")

    def _check_pinned(self, address: int, n_bytes: int, way: str) -> None:
        if not self.gpu.driver.pinned.contain(address, n_bytes):
            self._refuse_unpinned(address, n_bytes, way)

    def _refuse_unpinned(self, address: int, n_bytes: int, way: str) -> NoReturn:
        raise DeviceError(
            f"asked {self.name} to copy {n_bytes} bytes {way} {address:#x}, which is not pinned: take "
            "memory of alloc_pinned, pin it with RegisteredRange, or go through a Bounce"
        )

    def _host_addresses_are_shared(self) -> bool:
        with PinnedBuffer(self.gpu, PAGE_BYTES) as probe:
            return probe.device_address() == probe.address

    def _take(self, table: dict[int, _T], handle: int, what: str) -> _T:
        with self._lock:
            owned = table.pop(handle, None)
        if owned is None:
            raise DeviceError(f"asked {self.name} to destroy {what} {handle:#x}: it has made no such {what}")
        return owned


def _run_all(steps: list[Callable[[], None]]) -> None:
    first: BaseException | None = None
    for step in steps:
        try:
            step()
        except DeviceError as error:
            first = first or error
    if first is not None:
        raise first
