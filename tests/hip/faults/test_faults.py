"""Fault injection fails exactly the call that was armed, says so, and harms nothing else."""

from __future__ import annotations

import ctypes
import logging

import pytest

from expertier.errors import DeviceError
from expertier.hip.faults.device import FaultyDevice
from expertier.hip.faults.plan import FaultPlan
from expertier.hip.host import HostDevice


def test_the_nth_call_fails_once() -> None:
    plan = FaultPlan({"alloc": 2})
    device = FaultyDevice(HostDevice(), plan)
    memory = [device.alloc(1)]
    with pytest.raises(DeviceError, match="call 2 of alloc"):
        device.alloc(1)
    memory.append(device.alloc(1))
    for address in memory:
        device.free(address)
    device.close()
    assert plan.calls["alloc"] == 3
    assert plan.injected["alloc"] == 1


def test_a_failing_copy_leaves_half_of_the_bytes() -> None:
    plan = FaultPlan()
    device = FaultyDevice(HostDevice(), plan)
    source, target = device.alloc_pinned(8), device.alloc(8)
    ctypes.memset(source, 1, 8)
    plan.arm("copy_in", 1)
    with pytest.raises(DeviceError, match="copy_in"):
        device.copy_in(target, source, 8)
    assert ctypes.string_at(target, 8) == b"\x01" * 4 + bytes(4)


@pytest.mark.parametrize("operation", ["alloc", "alloc_pinned", "zero"])
def test_other_operations_fail_before_they_do_anything(operation: str) -> None:
    device = FaultyDevice(HostDevice(), FaultPlan({operation: 1}))
    with pytest.raises(DeviceError, match="injected fault"):
        getattr(device, operation)(*((0, 1) if operation == "zero" else (1,)))
    assert device.device_bytes == device.pinned_bytes == 0


def test_it_is_loud(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        plan = FaultPlan({"read": 1})
        assert plan.error_for("read", DeviceError) is not None
    assert "fault injection is on" in caplog.text
    assert "injected fault: call 1 of read" in caplog.text


def test_the_error_can_be_chosen_and_disarmed() -> None:
    plan = FaultPlan()
    plan.arm("read", 1, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        plan.check("read", DeviceError)
    plan.arm("read", 1)
    plan.disarm()
    plan.check("read", DeviceError)


def test_calls_are_counted_from_one() -> None:
    with pytest.raises(ValueError, match="count from 1"):
        FaultPlan({"read": 0})
