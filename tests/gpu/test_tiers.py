"""The tiers' state machine on a real GPU: `pytest tests/gpu --hypothesis-profile=deep` runs 2,000 examples of it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from devices.gpu_tier_machine import GpuTierMachine
from expertier.hip.driver.gpu import Gpu
from expertier.hip.driver.vendor import Vendor
from expertier.hip.gpu.device import GpuDevice
from expertier.hip.open import open_driver_gpu

SPIN_STEPS = 50_000  # a fraction of a millisecond


@pytest.fixture
def gpu(gpu_name: str) -> Iterator[Gpu]:
    """Keeps the GPU's context between examples: making one takes long."""
    vendor, _, ordinal = gpu_name.partition(":")
    gpu = open_driver_gpu(Vendor(vendor), int(ordinal), os.environ)
    yield gpu
    gpu.close()


def test_the_tiers_hold(gpu: Gpu) -> None:
    def open_gpu() -> GpuDevice:
        return GpuDevice(open_driver_gpu(gpu.driver.vendor, gpu.ordinal, os.environ))

    run_state_machine_as_test(
        GpuTierMachine.on(open_gpu, spin_steps=SPIN_STEPS),
        settings=settings(stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)),
    )
