"""The tiers' state machine on the fake drivers, whose streams dawdle: kernels, copies, events and pinned slabs."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from devices.gpu_tier_machine import GpuTierMachine
from devices.vendors import quick_on_hip
from expertier.hip.driver.vendor import Vendor
from expertier.hip.fake import FakeDriver, FakeLibraries
from expertier.hip.gpu.device import GpuDevice
from expertier.hip.open import open_driver_gpu


@quick_on_hip
@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "copies"])
def test_the_tiers_hold(
    fake: FakeDriver,
    vendor: Vendor,
    fake_libraries: FakeLibraries,
    monkeypatch: pytest.MonkeyPatch,
    kernels: bool,
) -> None:
    for name, value in fake_libraries.environ().items():
        monkeypatch.setenv(name, value)
    fake.set("jitter_us", 1000)
    fake.set("pinned_step", 512)  # so that small pinned memory may begin in the middle of a page

    def open_gpu() -> GpuDevice:
        return GpuDevice(open_driver_gpu(vendor, 0, os.environ), kernels=kernels)

    run_state_machine_as_test(
        GpuTierMachine.on(open_gpu, spin_steps=3_000_000),
        settings=settings(
            max_examples=max(4, settings().max_examples // 25),
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
