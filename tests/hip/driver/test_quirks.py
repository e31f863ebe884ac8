"""Defects that drivers were seen to have, each as a switch of the fake, and what expertier does about them.

The switches are listed in `hip/fake/fake.h`; docs/gpu-devices.md says where each defect was reported.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable

import numpy as np
import pytest

from devices.device_contract import random_bytes, read, write
from devices.peer_copies import copy_between
from expertier.errors import DeviceError, DriverError
from expertier.hip import Device
from expertier.hip.driver.codes import Code
from expertier.hip.driver.gpu import Gpu
from expertier.hip.driver.memory import PinnedBuffer, pinned_cost
from expertier.hip.driver.vendor import Vendor
from expertier.hip.fake import FakeDriver
from expertier.hip.fence import Fences
from expertier.hip.gpu.bounce import Bounce
from expertier.hip.gpu.device import GpuDevice
from expertier.hip.gpu.slab_memory import PlainSlabMemory, VmmSlabMemory, open_slab_memory
from expertier.hip.gpu.vmm.probe import ProbeStep, probe_vmm
from expertier.hip.gpu.vmm.virtual_memory import LEAST_CHUNK_BYTES, MOST_CHUNKS, VirtualRange, chunk_bytes_for
from expertier.units import KIB, MIB

OpenFake = Callable[..., GpuDevice]
CHUNK = LEAST_CHUNK_BYTES


def check_falls_back(device: Device, step: ProbeStep, caplog: pytest.LogCaptureFixture) -> None:
    """The slab must be plain, work, and a warning must name the step."""
    with caplog.at_level(logging.WARNING):
        slab = open_slab_memory(device, CHUNK, vmm=True, capacity_bytes=2 * CHUNK)
    assert isinstance(slab, PlainSlabMemory)
    assert not slab.resizable
    assert str(step) in caplog.text
    write(device, slab.base + CHUNK - 100, b"\x07" * 100)
    assert read(device, slab.base + CHUNK - 100, 100) == b"\x07" * 100
    with pytest.raises(DeviceError, match="one plain allocation"):
        slab.resize(2 * CHUNK)
    slab.close()


def test_a_reported_granularity_of_4_kib_is_not_believed(fake: FakeDriver, gpu: Gpu) -> None:
    fake.set("granularity", 4096)
    assert gpu.granularity() == 4096
    with VirtualRange(gpu, 3 * CHUNK + 4096) as memory:
        memory.grow_to(4096)
        assert memory.n_bytes == memory.chunk_bytes == CHUNK
        assert memory.address % (2 * MIB) == 0
    odd = 2 * MIB + 4096  # a chunk of a size that only the reported granularity divides
    assert chunk_bytes_for(gpu, MOST_CHUNKS * CHUNK + odd) % (2 * MIB) == 0


def test_access_refused_for_a_second_mapping(fake: FakeDriver, open_fake: OpenFake) -> None:
    fake.set("first_mapping_only", 1)
    with open_fake() as device:
        with VirtualRange(device.gpu, 2 * CHUNK) as memory, pytest.raises(DriverError, match="SetAccess"):
            memory.grow_to(2 * CHUNK)
        slab = open_slab_memory(device, CHUNK, vmm=True, capacity_bytes=3 * CHUNK)
        assert isinstance(slab, VmmSlabMemory)
        content = random_bytes(1000)
        write(device, slab.base, content)
        slab.resize(3 * CHUNK)
        write(device, slab.base + 3 * CHUNK - 1000, content[::-1])
        assert read(device, slab.base, 1000) == content
        assert read(device, slab.base + 3 * CHUNK - 1000, 1000) == content[::-1]
        slab.close()


def test_memory_that_stays_while_its_addresses_do(
    fake: FakeDriver, open_fake: OpenFake, caplog: pytest.LogCaptureFixture
) -> None:
    fake.set("vram_stays_reserved", 1)
    with open_fake() as device:
        free = device.free_bytes()
        check_falls_back(device, ProbeStep.RELEASE, caplog)
        assert device.free_bytes() == free


def test_stale_zeros_after_mapping(
    fake: FakeDriver, open_fake: OpenFake, caplog: pytest.LogCaptureFixture
) -> None:
    fake.set("stale_reads", 1)
    with open_fake() as device:
        check_falls_back(device, ProbeStep.READ_BACK, caplog)


def test_no_virtual_memory_at_all(
    fake: FakeDriver, open_fake: OpenFake, caplog: pytest.LogCaptureFixture
) -> None:
    fake.set("vmm", 0)
    with open_fake() as device:
        check_falls_back(device, ProbeStep.SUPPORT, caplog)


@pytest.mark.parametrize("vendor", ["hip"], indirect=True)
def test_a_runtime_that_is_too_old_for_virtual_memory(
    fake: FakeDriver, open_fake: OpenFake, caplog: pytest.LogCaptureFixture
) -> None:
    fake.set("version", 70_225_424)
    with open_fake() as device:
        check_falls_back(device, ProbeStep.VERSION, caplog)
        assert "it is version 7.2.25424; the oldest trusted version is 7.14.0" in caplog.text


def test_a_limit_of_handles_is_not_met(fake: FakeDriver, gpu: Gpu) -> None:
    """Chunks grow with the range, so that handles stay few; a range that meets a limit all the same is as before."""
    fake.set("vram_mib", 1 << 20)
    fake.set("handle_limit", MOST_CHUNKS)
    big = 2 * MOST_CHUNKS * CHUNK  # 32 GiB
    assert chunk_bytes_for(gpu, big) == 2 * CHUNK
    with VirtualRange(gpu, big) as memory:
        assert memory.reserved_bytes // memory.chunk_bytes <= MOST_CHUNKS
    fake.set("handle_limit", 3)
    with VirtualRange(gpu, 8 * CHUNK) as memory:
        memory.grow_to(2 * CHUNK)
        with pytest.raises(
            DriverError, match="the memory is there: the driver may be at the limit of open files"
        ):
            memory.grow_to(5 * CHUNK)
        assert memory.n_bytes == 2 * CHUNK
        assert fake.get("live_handles") == 2


def test_unmapping_does_not_wait_for_streams(fake: FakeDriver, open_fake: OpenFake) -> None:
    fake.set("unfenced_unmap", 1)
    with open_fake() as device:
        slab = open_slab_memory(device, 2 * CHUNK, vmm=True)
        staging, stream, fences = device.alloc_pinned(1 << 20), device.create_stream(), Fences(device)
        fake.set("jitter_us", 20_000)
        for _ in range(5):
            device.copy_in(slab.base + CHUNK, staging, 1 << 20, stream)
        slab.resize(CHUNK, after=[fences.after(stream)])
        device.synchronize()  # raises where a copy met unmapped memory
        slab.resize(2 * CHUNK)
        device.copy_in(slab.base + CHUNK, staging, 1 << 20, stream)
        slab.resize(CHUNK)
        device.synchronize()
        assert fake.get("faults") == 0
        fences.close()
        device.free(staging)
        slab.close()


def test_the_fake_notices_memory_that_is_unmapped_too_early(fake: FakeDriver, open_fake: OpenFake) -> None:
    """What the test above would see without the wait."""
    fake.set("unfenced_unmap", 1)
    with open_fake() as device:
        memory = VirtualRange(device.gpu, CHUNK)
        memory.grow_to(CHUNK)
        staging, stream = device.alloc_pinned(4096), device.create_stream()
        with fake.held():
            device.copy_in(memory.address, staging, 4096, stream)
            memory.shrink_to(0, after=[])
        with pytest.raises(DriverError, match=r"ILLEGAL_ADDRESS|IllegalAddress") as caught:
            device.synchronize()
        assert caught.value.code == Code.ILLEGAL_ADDRESS
        fake.reset()
        memory.close()
        device.free(staging)


def test_a_part_of_a_mapping_cannot_be_unmapped(fake: FakeDriver, open_fake: OpenFake) -> None:
    fake.set("whole_unmap_only", 1)
    with open_fake() as device:
        slab = open_slab_memory(device, 2 * CHUNK, vmm=True)
        with pytest.raises(DriverError, match="Unmap"):
            device.gpu.call("unmap", slab.base, CHUNK // 2)
        with pytest.raises(DriverError, match="Unmap"):
            device.gpu.call("unmap", slab.base, 2 * CHUNK)
        write(device, slab.base + CHUNK + 5, b"kept")
        slab.resize(CHUNK + 10)  # half of a chunk stays needed: the whole chunk stays
        assert slab.n_bytes == 2 * CHUNK
        assert read(device, slab.base + CHUNK + 5, 4) == b"kept"
        slab.resize(1)
        assert slab.n_bytes == device.device_bytes == CHUNK
        slab.close()


def test_copies_from_pageable_memory_are_synchronous(fake: FakeDriver, open_fake: OpenFake) -> None:
    """They are refused, and a bounce does them without the driver ever seeing pageable memory."""
    fake.set("pageable_synchronous", 1)
    content = random_bytes(3 << 20)
    pageable = np.frombuffer(content, np.uint8).copy()
    source = pageable.ctypes.data
    with open_fake() as device:
        address = device.alloc(len(content))
        with pytest.raises(DeviceError, match="which is not pinned"):
            device.copy_in(address, source, 100)
        with pytest.raises(DeviceError, match="which is not pinned"):
            device.copy_out(source, address, 100)
        with pytest.raises(DeviceError, match="which is not pinned"):
            device.copy_in_many(np.array([[address, source, 100]]))
        with Bounce(device, 4 << 20) as bounce:
            stream = device.create_stream()
            with fake.held():
                bounce.copy_in(address, source, len(content), stream)  # returns while no stream works
                pageable[:] = 0
            assert read(device, address, len(content)) == content
        assert fake.get("pageable_copies") == 0
        assert device.pinned_bytes == 0
        device.free(address)


def test_a_bounce_that_is_smaller_than_the_bytes(fake: FakeDriver, open_fake: OpenFake) -> None:
    fake.set("jitter_us", 200)
    content = random_bytes(100_001)
    with open_fake() as device, Bounce(device, 8192) as bounce:
        address = device.alloc(len(content))
        bounce.copy_in(
            address, np.frombuffer(content, np.uint8).ctypes.data, len(content), device.create_stream()
        )
        assert read(device, address, len(content)) == content
        device.free(address)


def test_pinned_memory_that_cannot_be_had_is_an_error(fake: FakeDriver, open_fake: OpenFake) -> None:
    with open_fake() as device:
        kept = device.alloc_pinned(4096)
        fake.set("pinned_fails", 1)
        with pytest.raises(
            DriverError, match=r"asked .* for 8\.0 MiB of pinned host memory: .* returned 2 \("
        ):
            device.alloc_pinned(8 * MIB)
        assert device.pinned_bytes == 4096
        fake.set("pinned_fails", 0)
        device.free(device.alloc_pinned(8 * MIB))
        device.free(kept)


def test_pinned_memory_in_the_middle_of_a_page(fake: FakeDriver, open_fake: OpenFake) -> None:
    before = fake.get("pinned_bytes")
    with open_fake() as device:
        here = fake.get("pinned_bytes")
        fake.set("pinned_misaligned", 1)
        address = device.alloc_pinned(5000)
        assert address % 4096 == 0
        assert device.pinned_bytes == device.pinned_allocation_bytes(5000)
        assert fake.get("pinned_bytes") - here == 8192  # no more than is counted
        ctypes.memset(address, 1, 8192)
        memory = device.alloc(8192)
        device.copy_in(memory, address, 8192)
        device.synchronize()
        assert read(device, memory, 8192) == b"\x01" * 8192
        device.free(memory)
        device.free(address)
        assert device.pinned_bytes == 0
    assert fake.get("pinned_bytes") == before


@pytest.mark.parametrize("n_bytes", [4096, 8192, 516 * KIB])
def test_pinned_memory_after_memory_of_an_odd_size(
    fake: FakeDriver, open_fake: OpenFake, n_bytes: int
) -> None:
    """CUDA cuts small pinned memory of all sizes from the same slabs; what is counted stays what a budget expects."""
    fake.set("pinned_step", 512)
    with open_fake() as device, PinnedBuffer(device.gpu, 1000):
        taken = [device.alloc_pinned(n_bytes) for _ in range(5)]
        assert all(address % 4096 == 0 for address in taken)
        assert device.pinned_bytes == 5 * device.pinned_allocation_bytes(n_bytes)
        for address in taken:
            device.free(address)
        assert device.pinned_bytes == 0


def test_pinned_memory_that_begins_nowhere_at_a_page(
    fake: FakeDriver, open_fake: OpenFake, vendor: Vendor
) -> None:
    with open_fake() as device:
        fake.set("pinned_misaligned", 1)
        fake.fail("hipHostRegister" if vendor is Vendor.HIP else "cuMemHostRegister_v2")
        before = fake.get("pinned_bytes")
        with pytest.raises(DeviceError):
            device.alloc_pinned(5000)
        assert device.pinned_bytes == 0
        assert fake.get("pinned_bytes") == before


@pytest.mark.parametrize("slabs", [True, False])
@pytest.mark.parametrize("n_bytes", [1, 8192, 516 * KIB, 700 * KIB, 3 * 512 * KIB, 2 * MIB, 3 * MIB + 4096])
def test_pinned_memory_that_is_cut_from_slabs(
    fake: FakeDriver, open_fake: OpenFake, n_bytes: int, slabs: bool
) -> None:
    """What is counted is what the host has less of, up to the slab that the last blocks lie in (I3)."""
    fake.set("pinned_slabs", slabs)
    with open_fake() as device:
        before = fake.get("pinned_bytes")
        taken = [device.alloc_pinned(n_bytes) for _ in range(40)]
        counted = device.pinned_bytes
        gone = fake.get("pinned_bytes") - before
        assert counted == 40 * device.pinned_allocation_bytes(n_bytes)
        assert gone - 2 * MIB < counted
        if n_bytes >= 2 * MIB:
            assert counted == gone
        for address in taken:
            device.free(address)
        assert fake.get("pinned_bytes") == before


def test_what_pinned_memory_costs() -> None:
    """The numbers that were measured on CUDA 13: whole slabs, thirds of slabs, pages."""
    assert pinned_cost(1) == pinned_cost(4096) == 4096
    assert pinned_cost(129 * 4096) == 699_051
    assert pinned_cost(3 * 512 * KIB) == pinned_cost(2 * MIB - 1) == pinned_cost(2 * MIB) == 2 * MIB
    assert pinned_cost(3 * MIB + 4095) == 3 * MIB + 4096


def test_peers_get_access_to_every_mapping_and_the_owner_keeps_its_own(
    fake: FakeDriver, open_fake: OpenFake
) -> None:
    fake.set("devices", 2)
    fake.set("owner_last", 1)
    with open_fake(0) as owner, open_fake(1) as other:
        slab = open_slab_memory(owner, CHUNK, vmm=True, capacity_bytes=3 * CHUNK, peers=[other.gpu])
        slab.resize(3 * CHUNK)
        target = other.alloc(1000)
        for chunk in range(3):
            place = slab.base + (chunk + 1) * CHUNK - 1000
            write(owner, place, random_bytes(1000, chunk))
            copy_between(other, target, place, 1000)
            assert read(other, target, 1000) == random_bytes(1000, chunk)
        other.free(target)
        slab.close()


def test_a_mapping_without_access_for_the_peer(fake: FakeDriver, open_fake: OpenFake) -> None:
    """The fake refuses what the test above needs the grants for."""
    fake.set("devices", 2)
    with open_fake(0) as owner, open_fake(1) as other:
        slab = open_slab_memory(owner, CHUNK, vmm=True)
        target = other.alloc(1000)
        with pytest.raises(DriverError, match="700"):
            copy_between(other, target, slab.base, 1000)
        fake.reset()
        fake.set("devices", 2)
        other.free(target)
        slab.close()


def test_memory_that_a_slab_grows_by_is_zero(fake: FakeDriver, open_fake: OpenFake) -> None:
    del fake
    with open_fake() as device:
        slab = open_slab_memory(device, CHUNK, vmm=True, capacity_bytes=2 * CHUNK)
        for _ in range(2):
            for begin in range(0, slab.n_bytes, CHUNK):
                assert read(device, slab.base + begin, 4096) == bytes(4096)
                assert read(device, slab.base + begin + CHUNK - 4096, 4096) == bytes(4096)
            slab.resize(2 * CHUNK)
        with pytest.raises(DeviceError, match=r"its addresses end at 128\.0 MiB"):
            slab.resize(2 * CHUNK + 1)
        slab.close()
        slab.close()


def test_a_probe_that_passes_leaves_nothing(fake: FakeDriver, gpu: Gpu) -> None:
    before = gpu.memory()
    result = probe_vmm(gpu)
    assert result.passed
    assert not result.access_from_base
    assert gpu.memory() == before
    assert fake.get("live_reservations") == fake.get("live_handles") == 0


def test_a_probe_without_memory_for_it(fake: FakeDriver, gpu: Gpu) -> None:
    fake.set("vram_mib", 100)
    result = probe_vmm(gpu)
    assert result.failed is ProbeStep.SECOND_ACCESS
    assert "returned 2" in result.detail
    assert gpu.memory()[0] == 100 * MIB
