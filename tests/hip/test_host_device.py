"""The contract of a device, on the host and through the fault wrapper."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable

import pytest

from expertier.errors import DeviceError
from expertier.hip import Device, open_device
from expertier.hip.fault_plan import FaultPlan
from expertier.hip.faults import FaultyDevice
from expertier.hip.host import HostDevice

MAKERS = [HostDevice, lambda: FaultyDevice(HostDevice(), FaultPlan())]


@pytest.fixture(params=MAKERS, ids=["host", "faulty"])
def device(request: pytest.FixtureRequest) -> Device:
    maker: Callable[[], Device] = request.param
    return maker()


def test_it_is_a_device(device: Device) -> None:
    assert isinstance(device, Device)
    assert device.name == "host"
    assert not device.has_streams


def test_memory_is_zero_aligned_writable_and_counted_in_pages(device: Device) -> None:
    one = device.alloc(5000)
    two = device.alloc_pinned(1)
    assert one % mmap.PAGESIZE == two % mmap.PAGESIZE == 0
    assert ctypes.string_at(one, 5000) == bytes(5000)
    assert device.allocation_bytes(5000) == device.device_bytes == 2 * mmap.PAGESIZE
    assert device.pinned_bytes == mmap.PAGESIZE
    ctypes.memset(two, 7, 1)
    device.copy_in(one + 4999, two, 1)
    assert ctypes.string_at(one, 5000) == bytes(4999) + b"\x07"
    device.free(one)
    device.free(two)
    assert device.device_bytes == device.pinned_bytes == 0
    device.close()


@pytest.mark.parametrize("n_bytes", [3, 5000, 2 * mmap.PAGESIZE])
def test_zero_clears_what_it_says_and_no_more(device: Device, n_bytes: int) -> None:
    memory = device.alloc(5000)
    ctypes.memset(memory, 9, 5000)
    device.zero(memory, n_bytes)
    assert ctypes.string_at(memory, 5000) == (bytes(n_bytes) + b"\x09" * 5000)[:5000]
    device.free(memory)


def test_close_complains_about_memory_that_is_left(device: Device) -> None:
    memory = device.alloc(100)
    with pytest.raises(DeviceError, match="1 allocations still live"):
        device.close()
    device.free(memory)
    device.close()


def test_leaving_the_block_closes_but_an_error_goes_first(device: Device) -> None:
    with pytest.raises(DeviceError, match="still live"), device:
        first = device.alloc(1)
    device.free(first)


def test_an_error_within_the_block_is_not_replaced() -> None:
    device = HostDevice()
    device.alloc(1)
    with pytest.raises(KeyError), device:
        raise KeyError("mine")
    with pytest.raises(DeviceError, match="was closed"):
        device.alloc(1)


def test_free_of_something_else_is_refused(device: Device) -> None:
    with pytest.raises(DeviceError, match="no live allocation"):
        device.free(4096)


@pytest.mark.parametrize("n_bytes", [1 << 62, 1 << 70])
def test_memory_that_is_not_there(device: Device, n_bytes: int) -> None:
    with pytest.raises(DeviceError, match=r"asked the host for \d+\.\d MiB"):
        device.alloc(n_bytes)
    assert device.device_bytes == 0


@pytest.mark.parametrize("n_bytes", [0, -1])
def test_an_allocation_has_bytes(device: Device, n_bytes: int) -> None:
    with pytest.raises(ValueError, match="at least one byte"):
        device.alloc(n_bytes)


@pytest.mark.parametrize("name", ["auto", "host"])
def test_open_device(name: str) -> None:
    assert open_device(name).name == "host"


@pytest.mark.parametrize(
    ("name", "message"),
    [("hip:0", "not available yet"), ("cuda:1", "not available yet"), ("gpu", "known are")],
)
def test_devices_that_are_not_there(name: str, message: str) -> None:
    with pytest.raises(DeviceError, match=message):
        open_device(name)
