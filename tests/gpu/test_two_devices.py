"""Two real GPUs: a model's layers on both, each in its own memory, and mappings that are granted to the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from devices.device_contract import random_bytes, read, write
from devices.peer_copies import copy_between
from devices.two_device_tiers import check_both
from expertier.errors import DeviceError
from expertier.hip import open_device
from expertier.hip.gpu.device import GpuDevice
from expertier.hip.gpu.slab_memory import VmmSlabMemory, open_slab_memory
from expertier.hip.gpu.vmm.probe import probe_vmm
from expertier.hip.gpu.vmm.virtual_memory import LEAST_CHUNK_BYTES

CHUNK = LEAST_CHUNK_BYTES


@pytest.fixture
def devices(gpu_name: str) -> Iterator[list[GpuDevice]]:
    vendor = gpu_name.partition(":")[0]
    with ExitStack() as closing:
        found: list[GpuDevice] = []
        for number in range(2):
            try:
                device = closing.enter_context(open_device(f"{vendor}:{number}"))
            except DeviceError as error:
                pytest.skip(f"this takes two GPUs: {error}")
            assert isinstance(device, GpuDevice)
            found.append(device)
        yield found


def test_both_at_once(devices: list[GpuDevice]) -> None:
    check_both(devices, rounds=20)


@pytest.mark.parametrize("owner", [0, 1])
def test_row_17_peers_read_every_mapping(devices: list[GpuDevice], owner: int) -> None:
    """Those that a slab begins with, and those that it grows by."""
    one, other = devices[owner], devices[1 - owner]
    result = probe_vmm(one.gpu)
    if not result.passed:
        pytest.skip(f"the probe failed at «{result.failed}»: {result.detail}")
    if not other.gpu.driver.integer("can_access_peer", other.gpu.ordinal, one.gpu.ordinal):
        pytest.skip(f"{other.name} does not reach the memory of {one.name}")
    slab = open_slab_memory(one, CHUNK, vmm=True, capacity_bytes=3 * CHUNK, peers=[other.gpu])
    assert isinstance(slab, VmmSlabMemory)
    target = other.alloc(4096)
    for n_chunks in (1, 3, 2, 3):
        slab.resize(n_chunks * CHUNK)
        for chunk in range(n_chunks):
            place = slab.base + (chunk + 1) * CHUNK - 4096
            content = random_bytes(4096, chunk + n_chunks)
            write(one, place, content)
            copy_between(other, target, place, 4096)
            assert read(other, target, 4096) == content
    other.free(target)
    slab.close()
