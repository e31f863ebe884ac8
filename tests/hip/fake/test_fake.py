"""The fake driver is a good stand-in: what is asynchronous stays so, mistakes are faults, switches work."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from devices.device_contract import read, write
from expertier.errors import BuildError, DriverError
from expertier.hip.driver.gpu import Gpu
from expertier.hip.driver.memory import DeviceBuffer, PinnedBuffer
from expertier.hip.driver.runtime import Event, Stream
from expertier.hip.driver.vendor import Vendor
from expertier.hip.fake import FakeDriver, FakeLibraries, build
from expertier.hip.gpu.device import GpuDevice

OpenFake = Callable[..., GpuDevice]

LINKS_MBPS = (400, 40, 4)
"""The fastest at which a machine as busy as this one sees that a copy is not done yet."""


def test_nothing_is_done_before_the_streams_work(fake: FakeDriver, open_fake: OpenFake) -> None:
    with open_fake() as device:
        target, staging = device.alloc(8), device.alloc_pinned(8)
        ctypes.memset(staging, 1, 8)
        stream, event = device.create_stream(), device.create_event()
        with fake.held():
            device.copy_in(target, staging, 8, stream)
            device.record_event(event, stream)
            assert not device.event_done(event)
            ctypes.memset(staging, 2, 8)  # too early
        device.wait_event(event)
        assert read(device, target, 8) == b"\x02" * 8
        device.destroy_event(event)
        device.free(target)
        device.free(staging)


def test_streams_advance_independently(fake: FakeDriver, gpu: Gpu) -> None:
    """One stream waits for an event that the other has not reached; a third goes on."""
    with (
        DeviceBuffer(gpu, 64 << 20) as memory,
        PinnedBuffer(gpu, 64 << 20) as source,
        Stream(gpu) as slow,
        Stream(gpu) as waiting,
        Stream(gpu) as free,
        Event(gpu) as event,
    ):
        for link_mbps in LINKS_MBPS:
            fake.set("link_mbps", link_mbps)
            gpu.call("copy_in", memory.address, source.address, 64 << 20, slow.handle)
            event.record(slow)
            waiting.wait(event)
            gpu.call("fill", memory.address, 1, 8, waiting.handle)
            free.synchronize()
            waiting_done, slow_done = waiting.done(), slow.done()
            waiting.synchronize()
            assert slow.done()
            if not slow_done:
                break
        assert not slow_done, "the free stream never went ahead"
        assert not waiting_done


def test_stream_0_waits_for_blocking_streams_only(fake: FakeDriver, gpu: Gpu) -> None:
    blocking = gpu.handle("stream_create", 0, 0)
    with (
        DeviceBuffer(gpu, 8) as memory,
        PinnedBuffer(gpu, 16 << 20) as source,
        DeviceBuffer(gpu, 16 << 20) as big,
    ):
        fake.set("link_mbps", 200)
        gpu.call("copy_in", big.address, source.address, 16 << 20, blocking)
        gpu.call("fill", memory.address, 0, 8, 0)
        gpu.call("stream_synchronize", 0)
        assert gpu.ask("stream_query", blocking)
        with Stream(gpu) as other:
            for link_mbps in LINKS_MBPS:
                fake.set("link_mbps", link_mbps)
                gpu.call("copy_in", big.address, source.address, 16 << 20, other.handle)
                gpu.call("fill", memory.address, 0, 8, 0)
                gpu.call("stream_synchronize", 0)
                went_ahead = not other.done()
                other.synchronize()
                if went_ahead:
                    break
            assert went_ahead, "stream 0 waited for a stream that does not block"
    gpu.call("stream_destroy", blocking)


def test_the_link_is_as_slow_as_it_is_told(fake: FakeDriver, gpu: Gpu) -> None:
    with DeviceBuffer(gpu, 4 << 20) as memory, PinnedBuffer(gpu, 4 << 20) as source:
        fake.set("link_mbps", 100)
        start = time.perf_counter()
        gpu.call("copy_in", memory.address, source.address, 4 << 20, 0)
        gpu.synchronize()
        assert time.perf_counter() - start >= (4 << 20) / 100e6


def test_new_device_memory_is_not_clean(fake: FakeDriver, gpu: Gpu) -> None:
    del fake
    with DeviceBuffer(gpu, 8192) as memory, PinnedBuffer(gpu, 8192) as target:
        gpu.call("copy_out", target.address, memory.address, 8192, 0)
        gpu.synchronize()
        assert target.array().all()


@pytest.mark.parametrize("mistake", ["beyond the end", "freed", "host address", "freed pinned"])
def test_a_copy_where_none_may_be_is_a_fault(fake: FakeDriver, gpu: Gpu, mistake: str) -> None:
    memory, source = DeviceBuffer(gpu, 8192), PinnedBuffer(gpu, 8192)
    target, origin = memory.address, source.address
    with fake.held():
        if mistake == "freed":
            fake.set("held", 0)
            memory.close()
        elif mistake == "beyond the end":
            target += 1
        elif mistake == "host address":
            target = 4096
        else:
            fake.set("pageable_synchronous", 0)
            gpu.call("copy_in", target, origin, 8192, 0)
            source.close()
        if mistake != "freed pinned":
            fake.set("pageable_synchronous", 0)
            gpu.call("copy_in", target, origin, 8192, 0)
    with pytest.raises(
        DriverError, match=r"returned 700 \((hipErrorIllegalAddress|CUDA_ERROR_ILLEGAL_ADDRESS)\)"
    ):
        gpu.synchronize()
    with pytest.raises(DriverError, match="700"):
        DeviceBuffer(gpu, 8)  # the device stays faulty
    fake.reset()
    memory.close()
    source.close()


def test_a_limit_of_memory(fake: FakeDriver, gpu: Gpu) -> None:
    fake.set("vram_mib", 8)
    with DeviceBuffer(gpu, 6 << 20):
        assert gpu.memory() == (2 << 20, 8 << 20)
        with pytest.raises(
            DriverError, match=r"asked .* for 3\.0 MiB of device memory: .*2\.0 MiB of 8\.0 MiB are free"
        ):
            DeviceBuffer(gpu, 3 << 20)
    assert gpu.memory() == (8 << 20, 8 << 20)


def test_the_nth_call_fails(fake: FakeDriver, gpu: Gpu, vendor: Vendor) -> None:
    fake.fail({Vendor.HIP: "hipMalloc", Vendor.CUDA: "cuMemAlloc_v2"}[vendor], 2, 3)
    DeviceBuffer(gpu, 8).close()
    with pytest.raises(DriverError, match="returned 3 "):
        DeviceBuffer(gpu, 8)
    DeviceBuffer(gpu, 8).close()
    assert fake.get("faults") == 1


def test_switches_that_do_not_exist(fake: FakeDriver) -> None:
    for use in (lambda: fake.set("vram", 1), lambda: fake.get("vram")):
        with pytest.raises(KeyError, match="vram"):
            use()


def test_hip_and_cuda_do_not_share_their_memory(fake_libraries: FakeLibraries) -> None:
    hip, cuda = FakeDriver(fake_libraries.hip), FakeDriver(fake_libraries.cuda)
    hip.set("vram_mib", 77)
    assert cuda.get("vram_mib") != 77
    hip.reset()


def test_an_integrators_program(fake_libraries: FakeLibraries) -> None:
    """By variables alone, in a process that knows nothing of the fake."""
    code = "import expertier as et\nwith et.open_device() as d: print(d.name, d.free_bytes() >> 20)"
    environ = {**os.environ, **fake_libraries.environ(Vendor.CUDA), "EXPERTIER_FAKE_VRAM_MIB": "3000"}
    environ["EXPERTIER_FAKE_DEVICES"] = "2"
    result = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True, timeout=120
    )
    assert result.stdout.split() == ["cuda:0", "2983"]


def test_a_fault_by_variable(fake_libraries: FakeLibraries) -> None:
    code = "import expertier as et\net.open_device('cuda:0')"
    environ = {
        **os.environ,
        **fake_libraries.environ(Vendor.CUDA),
        "EXPERTIER_FAKE_FAIL": "cuMemHostAlloc:1:2",
    }
    result = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=120
    )
    assert "cuMemHostAlloc returned 2 (CUDA_ERROR_OUT_OF_MEMORY)" in result.stderr


def test_a_machine_without_a_compiler(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="need a C and a C\\+\\+ compiler"):
        build(tmp_path, {"CC": "no-such-compiler", "CXX": "no-such-compiler"})
    assert list(tmp_path.iterdir()) == []


def test_what_is_written_is_read(fake: FakeDriver, open_fake: OpenFake) -> None:
    del fake
    with open_fake() as device:
        address = device.alloc(100)
        write(device, address, b"abc")
        assert read(device, address, 4) == b"abc\0"
        device.free(address)
