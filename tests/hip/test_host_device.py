"""What only the host device does, beside the contract."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import pytest

from expertier.errors import DeviceError
from expertier.hip import open_device
from expertier.hip.host import _HUGE_BYTES, HostDevice


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


def test_large_memory_asks_for_huge_pages_and_small_memory_does_not() -> None:
    if not Path("/sys/kernel/mm/transparent_hugepage").is_dir():
        pytest.skip("this kernel has no huge pages to ask for")
    with HostDevice() as device:
        for n_bytes, asked in ((_HUGE_BYTES, True), (1 << 20, False)):
            address = device.alloc(n_bytes)
            assert ("hg" in _flags(address)) == asked
            device.free(address)


def _flags(address: int) -> list[str]:
    """Return the kernel's flags of the mapping that `address` lies in."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if bounds is not None:
            inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError(f"{address:#x} is not mapped")
