"""Order between streams: nothing is overwritten before its readers are done, nor read before it is written (I10)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from expertier.hip.faults.device import FaultyDevice
from expertier.hip.faults.plan import FaultPlan
from expertier.hip.host import HostDevice
from expertier.testing import FakeDevice
from expertier.tiers.slots.fences import SlotFences


class Bench:
    """A fake device with a copy stream and two compute streams, and a list of what ran."""

    def __init__(self) -> None:
        self.device = FakeDevice()
        self.faults = FaultPlan()
        self.copy, self.first, self.second = (self.device.create_stream() for _ in range(3))
        self.fences = SlotFences(FaultyDevice(self.device, self.faults))
        self.ran: list[str] = []

    def queue(self, name: str, stream: int) -> None:
        self.device.launch(partial(self.ran.append, name), stream)

    def fill(self, name: str, slot: int = 0) -> None:
        self.fences.before_fill(0, [slot], self.copy)
        self.queue(name, self.copy)
        self.fences.after_fill(0, [slot], self.copy)

    def read(self, name: str, stream: int, slot: int = 0) -> None:
        self.fences.before_read(0, [slot], stream)
        self.queue(name, stream)
        self.fences.after_read(0, [slot], stream)

    def close(self) -> None:
        self.fences.close()
        for stream in (self.copy, self.first, self.second):
            self.device.destroy_stream(stream)
        self.device.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.close()


def test_a_read_waits_for_the_fill(bench: Bench) -> None:
    bench.fill("fill")
    bench.read("read", bench.first)
    assert bench.device.advance(bench.first, 9) == 0
    bench.device.advance(bench.copy, 9)
    bench.device.advance(bench.first, 9)
    assert bench.ran == ["fill", "read"]


def test_a_fill_waits_for_every_stream_that_reads(bench: Bench) -> None:
    bench.fill("fill")
    bench.device.synchronize()
    bench.read("first", bench.first)
    bench.read("second", bench.second)
    bench.fill("next fill")
    assert bench.device.advance(bench.copy, 9) == 0
    bench.device.advance(bench.second, 9)
    bench.device.advance(bench.copy, 9)
    assert bench.ran == ["fill", "second"], "it waits for both"
    bench.device.advance(bench.first, 9)
    bench.device.advance(bench.copy, 9)
    assert bench.ran == ["fill", "second", "first", "next fill"]


def test_slots_do_not_wait_for_each_other(bench: Bench) -> None:
    bench.read("read", bench.first, slot=1)
    bench.fill("fill", slot=0)
    bench.device.advance(bench.copy, 9)
    assert bench.ran == ["fill"]


def test_later_reads_of_a_stream_replace_its_earlier_ones(bench: Bench) -> None:
    bench.read("one", bench.first)
    bench.device.synchronize()
    bench.read("two", bench.first)
    bench.fill("fill")
    bench.device.advance(bench.copy, 9)
    assert bench.ran == ["one"]
    bench.device.synchronize()
    assert bench.ran == ["one", "two", "fill"]


def test_a_move_waits_for_all_and_all_wait_for_it(bench: Bench) -> None:
    bench.fill("fill", slot=0)
    bench.read("read", bench.first, slot=1)
    bench.fences.before_move(bench.copy)
    bench.queue("move", bench.copy)
    fence = bench.fences.after_move(bench.copy)
    assert fence is not None
    bench.read("later read", bench.second, slot=5)
    assert bench.device.advance(bench.second, 9) == 0
    bench.device.advance(bench.copy, 1)
    assert not fence.done()
    fence.wait()  # no limit: the device's wait has none
    assert bench.ran == ["fill", "read", "move"]
    bench.device.synchronize()
    assert bench.ran[-1] == "later read"


def test_a_caller_without_a_stream_waits_itself(bench: Bench) -> None:
    bench.fill("fill")
    bench.fences.before_read(0, [0], None)
    assert bench.ran == ["fill"]
    bench.fences.after_read(0, [0], None)
    bench.fill("next")
    bench.device.advance(bench.copy, 9)
    assert bench.ran == ["fill", "next"]


@pytest.mark.parametrize("operation", ["create_event", "record_event"])
def test_where_no_fence_can_be_made_the_work_is_waited_for(bench: Bench, operation: str) -> None:
    bench.faults.arm(operation, 1)
    bench.fill("fill")
    assert bench.ran == ["fill"]
    bench.faults.arm(operation, 1)
    bench.read("read", bench.first)
    assert bench.ran == ["fill", "read"]


@pytest.mark.parametrize("operation", ["create_event", "record_event"])
def test_an_interrupt_while_a_fence_is_made_leaves_nothing_queued(bench: Bench, operation: str) -> None:
    for number, act in enumerate((bench.fill, partial(bench.read, stream=bench.first)), start=1):
        bench.faults.arm(operation, 1, KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            act("work")
        assert bench.ran == ["work"] * number
        bench.faults.disarm()


def test_events_are_used_again(bench: Bench) -> None:
    for number in range(20):
        bench.fill(f"fill {number}", slot=number % 2)
        bench.device.synchronize()
    assert len(bench.device._events) <= 3


def test_a_device_without_streams_has_nothing_to_order() -> None:
    with HostDevice() as device:
        fences = SlotFences(device)
        fences.before_fill(0, [0], 0)
        assert fences.after_fill(0, [0], 0) is None
        fences.before_read(0, [0], None)
        fences.after_read(0, [0], None)
        fences.before_move(0)
        assert fences.after_move(0) is None
        fences.close()
