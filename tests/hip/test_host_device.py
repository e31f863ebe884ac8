"""What only the host device does, beside the contract."""

from __future__ import annotations

import mmap

import pytest

from expertier.errors import DeviceError
from expertier.hip import open_device
from expertier.hip.host import HostDevice


def test_it_counts_in_pages() -> None:
    device = HostDevice()
    assert device.name == "host"
    assert not device.has_streams
    assert device.allocation_bytes(5000) == device.pinned_allocation_bytes(5000) == 2 * mmap.PAGESIZE


def test_leaving_the_block_closes() -> None:
    device = HostDevice()
    with pytest.raises(DeviceError, match="still live"), device:
        first = device.alloc(1)
    device.free(first)


def test_it_has_no_streams() -> None:
    with pytest.raises(DeviceError, match="it has none"):
        HostDevice().create_stream()


def test_open_device() -> None:
    assert open_device("host").name == "host"


@pytest.mark.parametrize("name", ["gpu", "hip", "cuda:", "cuda:-1", "hip:0x1", "HIP:0", ""])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(DeviceError, match="known are 'auto', 'host', 'hip:N' and 'cuda:N'"):
        open_device(name)
