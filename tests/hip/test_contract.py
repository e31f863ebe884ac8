"""The contract of a device, on the host, through the fault wrapper, and on the fake drivers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from devices.device_contract import DeviceContract
from expertier.hip import Device
from expertier.hip.driver.vendor import Vendor
from expertier.hip.fake import FakeDriver, FakeLibraries
from expertier.hip.faults.device import FaultyDevice
from expertier.hip.faults.plan import FaultPlan
from expertier.hip.gpu.device import GpuDevice
from expertier.hip.host import HostDevice
from expertier.hip.open import open_driver_gpu


class TestHost(DeviceContract):
    @pytest.fixture(
        params=[HostDevice, lambda: FaultyDevice(HostDevice(), FaultPlan())], ids=["host", "faulty"]
    )
    def device(self, request: pytest.FixtureRequest) -> Device:
        maker: Callable[[], Device] = request.param
        return maker()

    @pytest.fixture
    def new_stream(self) -> Callable[[], int]:
        return lambda: 0


class TestFakeGpu(DeviceContract):
    """With kernels, and with the driver's copies alone; with streams that dawdle."""

    @pytest.fixture(params=[True, False], ids=["kernels", "copies"])
    def device(
        self, request: pytest.FixtureRequest, fake: FakeDriver, vendor: Vendor, fake_libraries: FakeLibraries
    ) -> Iterator[Device]:
        fake.set("jitter_us", 100)
        gpu = open_driver_gpu(vendor, 0, fake_libraries.environ())
        device = GpuDevice(gpu, kernels=request.param, environ=fake_libraries.environ())
        assert device.mover.kernels == request.param
        yield device
        device.close()

    @pytest.fixture
    def new_stream(self, device: Device) -> Callable[[], int]:
        return device.create_stream
