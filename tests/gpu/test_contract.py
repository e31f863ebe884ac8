"""The contract of a device, on a real GPU: with kernels, and with the driver's copies alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from devices.device_contract import DeviceContract
from expertier.hip import Device
from expertier.hip.driver.vendor import Vendor
from expertier.hip.gpu.device import GpuDevice
from expertier.hip.open import open_driver_gpu


class TestRealGpu(DeviceContract):
    @pytest.fixture(params=[True, False], ids=["kernels", "copies"])
    def device(self, request: pytest.FixtureRequest, gpu_name: str) -> Iterator[Device]:
        vendor, _, ordinal = gpu_name.partition(":")
        device = GpuDevice(open_driver_gpu(Vendor(vendor), int(ordinal), os.environ), kernels=request.param)
        assert device.mover.kernels == request.param, device.mover.without_kernels_because
        yield device
        device.close()

    @pytest.fixture
    def new_stream(self, device: Device) -> Callable[[], int]:
        return device.create_stream
