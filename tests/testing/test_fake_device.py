"""The fake device: streams that advance only when told to, and memory that complains."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
import pytest

from expertier.errors import DeviceError
from expertier.hip.device import Device
from expertier.testing import FakeDevice

N = 64


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    device = FakeDevice()
    yield device
    device.synchronize()


def pinned(device: FakeDevice, value: int) -> int:
    """Pinned memory that holds one byte again and again."""
    address = device.alloc_pinned(N)
    ctypes.memset(address, value, N)
    return address


def test_it_is_a_device(device: FakeDevice) -> None:
    assert isinstance(device, Device)
    assert device.has_streams


def test_a_copy_reads_its_source_when_it_runs(device: FakeDevice) -> None:
    source, target = pinned(device, 1), device.alloc(N)
    device.copy_in(target, source, N)
    ctypes.memset(source, 2, N)
    assert device.read(target, N) == bytes(N), "nothing runs by itself"
    assert device.advance(0) == 1
    assert device.read(target, N) == b"\x02" * N


def test_streams_advance_independently(device: FakeDevice) -> None:
    other = device.create_stream()
    order: list[str] = []
    device.launch(lambda: order.append("first"), 0)
    device.launch(lambda: order.append("second"), other)
    device.advance(other)
    assert order == ["second"]
    device.synchronize()
    assert order == ["second", "first"]


def test_a_stream_stops_at_an_event_until_the_other_one_gets_there(device: FakeDevice) -> None:
    other, event = device.create_stream(), device.create_event()
    order: list[str] = []
    device.launch(lambda: order.append("record"), 0)
    device.record_event(event, 0)
    device.stream_wait_event(other, event)
    device.launch(lambda: order.append("waits"), other)
    assert device.advance(other, 5) == 0
    assert not device.event_done(event)
    device.advance(0, 5)
    assert device.event_done(event)
    device.advance(other, 5)
    assert order == ["record", "waits"]


def test_a_wait_means_the_record_that_the_event_has_then(device: FakeDevice) -> None:
    other, event = device.create_stream(), device.create_event()
    device.launch(lambda: None, 0)
    device.record_event(event, 0)
    device.stream_wait_event(other, event)
    device.launch(lambda: None, 0)
    device.record_event(event, 0)  # a later record, which `other` does not wait for
    device.advance(0, 2)
    assert device.advance(other, 1) == 1
    assert not device.event_done(event)


def test_waiting_for_an_event_runs_what_it_takes(device: FakeDevice) -> None:
    event = device.create_event()
    assert device.event_done(event), "an event that was not recorded is done"
    ran: list[int] = []
    for number in range(3):
        device.launch(lambda number=number: ran.append(number))
    device.record_event(event, 0)
    device.wait_event(event)
    assert ran == [0, 1, 2]


def test_memory_is_not_freed_under_queued_work(device: FakeDevice) -> None:
    source, target = pinned(device, 1), device.alloc(N)
    device.copy_in(target, source, N)
    with pytest.raises(AssertionError, match="freed under work"):
        device.free(source)
    device.synchronize()
    device.free(source)
    device.free(target)


def test_rounding_is_counted_and_touches_no_neighbour() -> None:
    device = FakeDevice(pinned_power_of_two=True)
    first, second = device.alloc_pinned(5 * 4096), device.alloc_pinned(5 * 4096)
    assert device.pinned_bytes == 2 * 8 * 4096
    target = device.alloc(N)
    device.copy_in(target, max(first, second), N)
    device.free(min(first, second))  # what the allocator rounds up to is nobody's memory
    device.synchronize()


def test_capacity_is_a_limit() -> None:
    device = FakeDevice(capacity_bytes=3 * 4096)
    device.alloc(4097)
    assert device.free_bytes() == 4096
    with pytest.raises(DeviceError, match="lower the budgets"):
        device.alloc(4097)


def test_moves_run_piece_by_piece_in_their_order(device: FakeDevice) -> None:
    base = device.alloc(3 * N)
    for i in range(3):
        ctypes.memset(base + i * N, i + 1, N)
    device.copy_within(np.array([[base + 2 * N, base + N, N], [base + N, base, N]], np.int64))
    assert device.queued(0) == 2
    device.synchronize()
    assert device.read(base, 3 * N) == b"\x01" * N * 2 + b"\x02" * N


def test_what_is_left_at_the_end_is_named() -> None:
    device = FakeDevice()
    stream, event, memory = device.create_stream(), device.create_event(), device.alloc(1)
    with pytest.raises(AssertionError, match="events"):
        device.close()
    device.destroy_event(event)
    with pytest.raises(AssertionError, match="streams"):
        device.close()
    device.destroy_stream(stream)
    with pytest.raises(DeviceError, match="still live"):
        device.close()
    device.free(memory)
    device.close()
