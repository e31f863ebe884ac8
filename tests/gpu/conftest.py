"""A real GPU, or a skip that says why there is none."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from expertier.errors import DeviceError
from expertier.hip import open_device
from expertier.hip.driver.driver import open_driver
from expertier.hip.driver.vendor import Vendor
from expertier.hip.gpu.device import GpuDevice


@pytest.fixture(scope="session")
def gpu_name() -> str:
    """EXPERTIER_TEST_GPU, such as `cuda:0`, or the first GPU of a driver that has any."""
    chosen = os.environ.get("EXPERTIER_TEST_GPU")
    if chosen:
        return chosen
    reasons = []
    for vendor in Vendor:
        try:
            if open_driver(vendor).device_count():
                return f"{vendor}:0"
            reasons.append(f"{vendor}: no devices")
        except DeviceError as error:
            reasons.append(f"{vendor}: {error}")
    pytest.skip("no GPU: " + "; ".join(reasons))


@pytest.fixture
def device(gpu_name: str) -> Iterator[GpuDevice]:
    device = open_device(gpu_name)
    assert isinstance(device, GpuDevice)
    yield device
    device.close()
