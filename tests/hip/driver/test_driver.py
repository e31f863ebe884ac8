"""The table of driver calls: loaded late, errors that say everything, the caller's thread left as it was."""

from __future__ import annotations

import ctypes
import gc
import logging
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from expertier.errors import DeviceError, DriverError
from expertier.hip import open_device
from expertier.hip.driver.bindings import CALLS
from expertier.hip.driver.codes import Code
from expertier.hip.driver.driver import Driver, open_driver
from expertier.hip.driver.gpu import Gpu
from expertier.hip.driver.memory import DeviceBuffer, PinnedBuffer, RegisteredRange
from expertier.hip.driver.runtime import Event, Stream
from expertier.hip.driver.structs import AccessDescriptor, AllocationProperties, device_memory, read_write
from expertier.hip.driver.vendor import TRAITS, Vendor
from expertier.hip.fake import FakeDriver, FakeLibraries
from expertier.hip.gpu.device import GpuDevice
from expertier.hip.open import open_driver_gpu
from limits.waits import joined

OpenFake = Callable[..., GpuDevice]


def test_importing_loads_no_driver_and_needs_none() -> None:
    code = (
        "import expertier.hip.gpu.device, expertier.hip.open, expertier.hip.gpu.slab_memory\n"
        "names = open('/proc/self/maps').read()\n"
        "assert not any(name in names for name in ('libamdhip64', 'libcuda.so', 'hiprtc', 'nvrtc')), names\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_the_structures_are_those_of_hip_7_1_and_cuda_13() -> None:
    assert ctypes.sizeof(AllocationProperties) == 32
    assert ctypes.sizeof(AccessDescriptor) == 12
    assert AllocationProperties.location.offset == 8
    assert AllocationProperties.os_metadata.offset == 16
    assert bytes(device_memory(3)) == bytes([1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 3, 0, 0, 0]) + bytes(16)
    assert bytes(read_write([2, 1])) == bytes(
        [1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 3, 0, 0, 0]
    )


def test_the_fake_has_every_call(fake: FakeDriver, vendor: Vendor, fake_libraries: FakeLibraries) -> None:
    del fake
    assert open_driver(vendor, fake_libraries.environ()).missing == []


def test_the_names_are_the_vendors() -> None:
    for hip, cuda, _ in CALLS.values():
        assert hip.startswith("hip")
        assert cuda.startswith("cu")


@pytest.mark.parametrize("vendor", list(Vendor))
def test_a_library_that_is_not_there(vendor: Vendor) -> None:
    variable = TRAITS[vendor].library_variable
    with pytest.raises(DeviceError, match=f"{variable}='/nowhere.so' cannot be loaded .* unset it"):
        open_device(f"{vendor}:0", environ={variable: "/nowhere.so"})
    with pytest.raises(
        DeviceError, match=rf"asked for device '{vendor}:0': .* name the library in {variable}"
    ):
        open_device(f"{vendor}:0", environ={})


def test_a_library_that_is_no_driver(vendor: Vendor) -> None:
    with pytest.raises(DeviceError, match=r"has no (hip|cu)Init: it is too old, or no (hip|cuda) driver"):
        open_device(f"{vendor}:0", environ={TRAITS[vendor].library_variable: "libm.so.6"})


def test_errors_name_the_call_the_code_and_the_bytes(
    fake: FakeDriver, open_fake: OpenFake, vendor: Vendor
) -> None:
    fake.set("vram_mib", 100)
    with open_fake() as device, pytest.raises(DriverError) as caught:
        device.alloc(200 << 20)
    call, name = {
        Vendor.HIP: ("hipMalloc", "hipErrorOutOfMemory"),
        Vendor.CUDA: ("cuMemAlloc_v2", "CUDA_ERROR_OUT_OF_MEMORY"),
    }[vendor]
    free = 100 - device.overhead_bytes / (1 << 20)
    assert str(caught.value) == (
        f"asked {vendor}:0 for 200.0 MiB of device memory: {call} returned 2 ({name}); {free:.1f} MiB of 100.0 "
        "MiB are free on the GPU; lower the budgets or free memory"
    )
    assert (caught.value.call, caught.value.code) == (call, Code.OUT_OF_MEMORY)


def test_a_code_without_a_name(fake: FakeDriver, gpu: Gpu) -> None:
    fake.fail({"hip": "hipMalloc", "cuda": "cuMemAlloc_v2"}[gpu.driver.vendor], 1, 4242)
    with pytest.raises(DriverError, match=r"returned 4242 \((no name|hipErrorUnknown)\)"):
        DeviceBuffer(gpu, 4096)


def test_no_devices(fake: FakeDriver, open_fake: OpenFake, vendor: Vendor) -> None:
    fake.set("devices", 0)
    with pytest.raises(
        DeviceError, match=rf"asked for device '{vendor}:0': .* returned 100 \(.*NO_?DEVICE\)|NoDevice"
    ):
        open_fake()


def test_a_device_beyond_the_last(fake: FakeDriver, open_fake: OpenFake) -> None:
    del fake
    with pytest.raises(DeviceError, match="has 1 devices, numbered from 0"):
        open_fake(1)


def test_a_driver_that_is_too_old(fake: FakeDriver, open_fake: OpenFake, vendor: Vendor) -> None:
    fake.set("version", {Vendor.HIP: 50_221_153, Vendor.CUDA: 11_080}[vendor])
    oldest = {Vendor.HIP: r"is version 5\.2\.21153; .* 6\.0\.0", Vendor.CUDA: r"is version 11\.8; .* 12\.0"}[
        vendor
    ]
    with pytest.raises(DeviceError, match=oldest):
        open_fake()


def test_auto_takes_the_most_free_memory_and_says_why(
    fake_libraries: FakeLibraries, caplog: pytest.LogCaptureFixture
) -> None:
    fakes = {vendor: FakeDriver(getattr(fake_libraries, vendor)) for vendor in Vendor}
    for one in fakes.values():
        one.reset()
    fakes[Vendor.CUDA].set("vram_mib", 2048)
    fakes[Vendor.CUDA].set("devices", 2)
    with caplog.at_level(logging.INFO):
        blocking = DeviceBuffer(open_driver_gpu(Vendor.CUDA, 0, fake_libraries.environ()), 512 << 20)
        with open_device(environ=fake_libraries.environ()) as device:
            assert device.name == "cuda:1"
        blocking.close()
        blocking.gpu.close()
    assert "device auto is cuda:1: hip:0 (Fake HIP device 0) has 1024.0 MiB of 1024.0 MiB free" in caplog.text
    assert "cuda:0 (Fake CUDA device 0) has 1536.0 MiB of 2048.0 MiB free" in caplog.text
    for one in fakes.values():
        one.reset()
        assert one.live() == {}


def test_auto_is_the_host_without_gpus(caplog: pytest.LogCaptureFixture) -> None:
    environ = {TRAITS[vendor].library_variable: "/nowhere.so" for vendor in Vendor}
    with caplog.at_level(logging.INFO):
        assert open_device(environ=environ).name == "host"
    assert "device auto is the host: hip: EXPERTIER_HIP_LIBRARY='/nowhere.so' cannot be loaded" in caplog.text


def test_auto_goes_on_without_a_gpu_that_does_not_work(
    fake: FakeDriver, vendor: Vendor, fake_libraries: FakeLibraries, caplog: pytest.LogCaptureFixture
) -> None:
    fake.set("pinned_fails", 1)
    other = Vendor.CUDA if vendor is Vendor.HIP else Vendor.HIP
    environ = {**fake_libraries.environ(vendor), TRAITS[other].library_variable: "/nowhere.so"}
    with caplog.at_level(logging.INFO):
        assert open_device(environ=environ).name == "host"
    assert f"{vendor}:0 cannot be used: asked {vendor}:0 for" in caplog.text


def test_a_threads_own_device_stays(fake: FakeDriver, open_fake: OpenFake, vendor: Vendor) -> None:
    """An engine's thread works on another GPU; our calls must not change that."""
    fake.set("devices", 3)
    with open_fake(1) as device:
        driver: Driver = device.gpu.driver
        address = device.alloc(1 << 20)

        def in_thread() -> None:
            if vendor is Vendor.HIP:
                driver.call("set_device", 2)
            else:
                theirs = driver.handle("context_retain", 2)
                driver.call("context_set", theirs)
            device.zero(address, 1 << 20)
            with pytest.raises(DriverError):
                device.alloc(1 << 62)
            if vendor is Vendor.HIP:
                seen.append(driver.integer("get_device") == 2)
            else:
                seen.append(driver.handle("context_get") == theirs)
                driver.call("context_release", 2)

        seen: list[bool] = []
        thread = threading.Thread(target=in_thread, daemon=True)
        thread.start()
        joined(thread)
        assert seen == [True]
        device.free(address)


@pytest.mark.parametrize("vendor", ["hip"], indirect=True)
def test_hips_last_error_is_not_left_to_others(fake: FakeDriver, open_fake: OpenFake) -> None:
    with open_fake() as device:
        last_error = device.gpu.driver.library.hipPeekAtLastError
        with pytest.raises(DriverError):
            device.alloc(1 << 62)
        assert last_error() == 0
        event = device.create_event()
        with fake.held():
            device.record_event(event, 0)
            assert not device.event_done(event)
        assert last_error() == 0
        device.destroy_event(event)


def test_owned_objects_close_once_and_complain_when_dropped(fake: FakeDriver, gpu: Gpu) -> None:
    makers: list[Callable[[], Stream | Event | DeviceBuffer | PinnedBuffer]] = [
        lambda: Stream(gpu, low_priority=True),
        lambda: Event(gpu),
        lambda: DeviceBuffer(gpu, 4096),
        lambda: PinnedBuffer(gpu, 4096),
    ]
    before = fake.live()
    for make in makers:
        with make() as owned:
            assert not owned.closed
        assert owned.closed
        owned.close()
        assert fake.live() == before
        with pytest.warns(ResourceWarning, match=r"(Stream|Event|Buffer)\(.*\) was never closed"):
            make()
        assert fake.live() == before


@pytest.mark.parametrize("vendor", ["cuda"], indirect=True)
def test_what_went_with_its_context_is_dropped_quietly(
    fake: FakeDriver, vendor: Vendor, fake_libraries: FakeLibraries
) -> None:
    fake.set("contexts_end", 1)
    gpu = open_driver_gpu(vendor, 0, fake_libraries.environ())
    left = [DeviceBuffer(gpu, 4096), PinnedBuffer(gpu, 4096)]
    assert fake.live() == {"live_allocations": 1, "live_pinned": 1, "live_contexts": 1}
    gpu.close()
    assert fake.live() == {}
    with pytest.raises(DriverError, match=r"709 \(CUDA_ERROR_CONTEXT_IS_DESTROYED\)"):
        left[1].gpu.synchronize()
    with (
        warnings.catch_warnings()
    ):  # an error in __del__ is a warning of pytest's, which is an error here as well
        warnings.simplefilter("error")
        left.clear()
        gc.collect()


@pytest.mark.parametrize("vendor", ["cuda"], indirect=True)
def test_what_outlives_its_gpu_while_the_context_lives_is_given_back(
    fake: FakeDriver, vendor: Vendor, fake_libraries: FakeLibraries, gpu: Gpu
) -> None:
    fake.set("contexts_end", 1)
    second = open_driver_gpu(vendor, 0, fake_libraries.environ())
    left = [PinnedBuffer(second, 4096)]
    second.close()
    with pytest.warns(ResourceWarning, match="PinnedBuffer.* was never closed"):
        left.clear()
    assert fake.live() == {"live_contexts": 1}
    assert not gpu.closed


def test_an_object_that_could_not_be_made_does_not_complain(fake: FakeDriver, gpu: Gpu) -> None:
    fake.set("vram_mib", 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(DriverError):
            DeviceBuffer(gpu, 2 << 20)


def test_memory_of_others_can_be_pinned(fake: FakeDriver, open_fake: OpenFake) -> None:
    with open_fake() as device:
        memory = ctypes.create_string_buffer(8192)
        address = ctypes.addressof(memory)
        target = device.alloc(8192)
        with RegisteredRange(device.gpu, address, 8192):
            device.copy_in(target, address + 10, 100)
            device.synchronize()
            with pytest.raises(DriverError, match="712"):
                RegisteredRange(device.gpu, address, 8192)
        with pytest.raises(DeviceError, match="not pinned"):
            device.copy_in(target, address + 10, 100)
        assert fake.get("pageable_copies") == 0
        device.free(target)


class _CupyStream:
    def __init__(self, ptr: object) -> None:
        self.ptr = ptr


def test_streams_of_other_libraries(fake: FakeDriver, open_fake: OpenFake) -> None:
    with open_fake() as device, Stream(device.gpu) as stream:
        target = device.alloc(1 << 20)
        with fake.held():
            device.zero(target, 1 << 20, _CupyStream(stream.handle))
            assert not stream.done()
        stream.synchronize()
        assert stream.done()
        with pytest.raises(TypeError, match="a stream is a number or has one in `ptr`, got _CupyStream"):
            device.zero(target, 1, _CupyStream("none"))
        device.free(target)


def test_the_variables_of_the_documentation_exist() -> None:
    page = (Path(__file__).parents[3] / "docs" / "gpu-devices.md").read_text()
    for traits in TRAITS.values():
        assert traits.library_variable in page
        assert traits.compiler_variable in page
