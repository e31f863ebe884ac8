"""A device without hardware, whose streams advance only when told to."""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from expertier.errors import DeviceError
from expertier.hip.device import Moves
from expertier.hip.host import HostDevice
from expertier.units import mib

_DIRTY = 0xDB


@dataclass(slots=True)
class _Work:
    """One queued piece of work: what it does, and the memory that it touches as (address, bytes)."""

    run: Callable[[], None]
    touches: tuple[tuple[int, int], ...] = ()


@dataclass(slots=True)
class _Record:
    """A point in a stream that an event was recorded at."""

    stream: int
    reached: bool = False


@dataclass(slots=True)
class _Wait:
    """Work after this waits for a point in another stream."""

    record: _Record


class FakeDevice:
    """Device memory and pinned memory as plain memory of this process, and streams as queues. A `Device`.

    Work lies in its stream's queue until `advance` runs it, or until a caller waits for it. Streams advance
    independently, a wait runs only the work that it waits for, and copies read their source when they run, not when
    they are queued. So a slot that is overwritten too early, or a block that is used again too early, shows as wrong
    bytes. To free memory that queued work still touches raises `AssertionError`, as does a wait that nothing can end.

    `capacity_bytes` limits device memory, allocations are rounded to `page_bytes`, and with `pinned_power_of_two`
    pinned allocations are rounded to a power of two, as some drivers do. Thread-safe.
    """

    def __init__(
        self,
        *,
        capacity_bytes: int = 1 << 40,
        page_bytes: int = 4096,
        pinned_power_of_two: bool = False,
        name: str = "fake:0",
    ) -> None:
        """Open a device that has stream 0 and no allocations."""
        self._name = name
        self._memory = HostDevice()
        self._capacity_bytes = capacity_bytes
        self._page_bytes = page_bytes
        self._pinned_power_of_two = pinned_power_of_two
        self._lock = threading.RLock()
        self._streams: dict[int, deque[_Work | _Record | _Wait]] = {0: deque()}
        self._events: dict[int, _Record] = {}
        self._taken: dict[int, tuple[int, bool, int]] = {}  # address → bytes counted, whether pinned, bytes
        self._next = 1

    # ---- what a test does with the device

    @property
    def streams(self) -> tuple[int, ...]:
        """The streams that exist now."""
        with self._lock:
            return tuple(self._streams)

    @property
    def n_events(self) -> int:
        """How many events exist now."""
        return len(self._events)

    def queued(self, stream: int) -> int:
        """Return how many pieces of work wait in a stream."""
        with self._lock:
            return len(self._streams[stream])

    def advance(self, stream: int, n: int = 1) -> int:
        """Run up to `n` pieces of a stream's work; return how many ran before one had to wait."""
        with self._lock:
            done = 0
            while done < n and self._step(stream):
                done += 1
            return done

    def launch(self, work: Callable[[], None], stream: int = 0) -> None:
        """Queue a function, as a kernel: it runs when its turn in the stream comes."""
        with self._lock:
            self._queue(stream).append(_Work(work))

    def read(self, address: int, n_bytes: int) -> bytes:
        """Return bytes of device memory as they are at this moment."""
        return ctypes.string_at(address, n_bytes)

    # ---- Device

    @property
    def name(self) -> str:
        """The name it was given."""
        return self._name

    @property
    def has_streams(self) -> bool:
        """True."""
        return True

    @property
    def has_own_memory(self) -> bool:
        """Whether it stands for a GPU: as one with streams does."""
        return self.has_streams

    @property
    def device_bytes(self) -> int:
        """Live device bytes, rounded."""
        return self._live(pinned=False)

    @property
    def pinned_bytes(self) -> int:
        """Live pinned bytes, rounded."""
        return self._live(pinned=True)

    def free_bytes(self) -> int:
        """Return what is left of the capacity."""
        return self._capacity_bytes - self.device_bytes

    def allocation_bytes(self, n_bytes: int) -> int:
        """Return `n_bytes` in whole pages."""
        return -(-n_bytes // self._page_bytes) * self._page_bytes

    def pinned_allocation_bytes(self, n_bytes: int) -> int:
        """Return `n_bytes` in whole pages, or as the next power of two."""
        if self._pinned_power_of_two:
            return max(1 << (n_bytes - 1).bit_length(), self._page_bytes)
        return self.allocation_bytes(n_bytes)

    def alloc(self, n_bytes: int) -> int:
        """Take device memory."""
        with self._lock:
            size = self.allocation_bytes(n_bytes)
            if size > self.free_bytes():
                raise DeviceError(
                    f"asked {self._name} for {mib(size)}, but of its {mib(self._capacity_bytes)} only "
                    f"{mib(self.free_bytes())} are left: lower the budgets"
                )
            return self._take(n_bytes, size, pinned=False)

    def alloc_pinned(self, n_bytes: int) -> int:
        """Take pinned memory."""
        with self._lock:
            return self._take(n_bytes, self.pinned_allocation_bytes(n_bytes), pinned=True)

    def free(self, address: int) -> None:
        """Give memory back; `AssertionError` when queued work would still touch it."""
        with self._lock:
            taken = self._taken.get(address)
            if taken is not None:
                for stream, queue in self._streams.items():
                    for entry in queue:
                        if isinstance(entry, _Work):
                            assert not any(
                                at < address + taken[2] and address < at + n for at, n in entry.touches
                            ), f"memory at {address:#x} freed under work that is queued on stream {stream}"
            self._memory.free(address)
            self._taken.pop(address, None)

    def create_stream(self, *, low_priority: bool = False) -> int:  # noqa: ARG002 (nothing runs by itself)
        """Make a stream."""
        with self._lock:
            self._streams[self._next] = deque()
            self._next += 1
            return self._next - 1

    def destroy_stream(self, stream: int) -> None:
        """End a stream; `AssertionError` when it has work left."""
        with self._lock:
            assert not self._queue(stream), f"stream {stream} destroyed with work left"
            del self._streams[stream]

    def create_event(self) -> int:
        """Make an event, done."""
        with self._lock:
            self._events[self._next] = _Record(0, reached=True)
            self._next += 1
            return self._next - 1

    def destroy_event(self, event: int) -> None:
        """End an event."""
        with self._lock:
            del self._events[event]

    def record_event(self, event: int, stream: int) -> None:
        """Put the event's record at the end of the stream."""
        with self._lock:
            assert event in self._events, f"event {event} was destroyed"
            queue = self._queue(stream)
            self._events[event] = _Record(stream, reached=not queue)
            if queue:
                queue.append(self._events[event])

    def event_done(self, event: int) -> bool:
        """Whether its record was reached."""
        with self._lock:
            return self._events[event].reached

    def wait_event(self, event: int) -> None:
        """Run only the work that comes before the event's record: in its stream, and in streams that this waits for."""
        with self._lock:
            self._reach(self._events[event])

    def stream_wait_event(self, stream: int, event: int) -> None:
        """Put a wait for the event's record at the end of the stream."""
        with self._lock:
            record = self._events[event]
            if not record.reached:
                self._queue(stream).append(_Wait(record))

    def synchronize(self) -> None:
        """Run all queued work."""
        with self._lock:
            while any(self._streams.values()):
                ran = [self._step(stream) for stream in list(self._streams)]
                assert any(ran), "the streams wait for each other"

    def copy_in(self, target: int, source: int, n_bytes: int, stream: int = 0) -> None:
        """Queue a copy."""
        self._copy(target, source, n_bytes, stream)

    def copy_out(self, target: int, source: int, n_bytes: int, stream: int = 0) -> None:
        """Queue a copy."""
        self._copy(target, source, n_bytes, stream)

    def copy_within(self, moves: Moves, stream: int = 0) -> None:
        """Queue the moves, each as a piece of its own."""
        for target, source, n_bytes in moves.tolist():
            self._copy(target, source, n_bytes, stream)

    def zero(self, target: int, n_bytes: int, stream: int = 0) -> None:
        """Queue a clearing."""
        with self._lock:
            work = _Work(lambda: _fill(target, 0, n_bytes), ((target, n_bytes),))
            self._queue(stream).append(work)

    def close(self) -> None:
        """End the use: `AssertionError` for streams or events that are left, `DeviceError` for memory."""
        with self._lock:
            self.synchronize()
            assert not self._events, f"{len(self._events)} events were not destroyed"
            assert set(self._streams) == {0}, f"streams {sorted(set(self._streams) - {0})} were not destroyed"
            self._memory.close()

    def __enter__(self) -> Self:
        """Return the device itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close, unless an exception is being raised already."""
        if error is None:
            self.close()

    # ---- with the lock held

    def _take(self, n_bytes: int, counted_bytes: int, *, pinned: bool) -> int:
        address = self._memory.alloc_pinned(n_bytes) if pinned else self._memory.alloc(n_bytes)
        if pinned:
            _fill(
                address, _DIRTY, n_bytes
            )  # new pinned memory may hold anything, so no code may rely on zeros
        self._taken[address] = (counted_bytes, pinned, n_bytes)
        return address

    def _live(self, *, pinned: bool) -> int:
        with self._lock:
            return sum(size for size, is_pinned, _ in self._taken.values() if is_pinned == pinned)

    def _queue(self, stream: int) -> deque[_Work | _Record | _Wait]:
        if stream not in self._streams:
            raise DeviceError(f"asked {self._name} for stream {stream}: there are {sorted(self._streams)}")
        return self._streams[stream]

    def _copy(self, target: int, source: int, n_bytes: int, stream: int) -> None:
        with self._lock:
            work = _Work(lambda: _move(target, source, n_bytes), ((target, n_bytes), (source, n_bytes)))
            self._queue(stream).append(work)

    def _step(self, stream: int) -> bool:
        """Run a stream's next piece; False when there is none, or it has to wait."""
        queue = self._queue(stream)
        if not queue:
            return False
        entry = queue[0]
        if isinstance(entry, _Wait) and not entry.record.reached:
            return False
        queue.popleft()
        if isinstance(entry, _Work):
            entry.run()
        elif isinstance(entry, _Record):
            entry.reached = True
        return True

    def _reach(self, record: _Record) -> None:
        """Run a stream up to a record in its queue."""
        while not record.reached:
            if not self._step(record.stream):
                queue = self._streams[record.stream]
                assert queue, "a wait for a record that is in no stream"
                blocked = queue[0]
                assert isinstance(blocked, _Wait)
                self._reach(blocked.record)


def _move(target: int, source: int, n_bytes: int) -> None:
    ctypes.memmove(target, source, n_bytes)


def _fill(target: int, value: int, n_bytes: int) -> None:
    ctypes.memset(target, value, n_bytes)
