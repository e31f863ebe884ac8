"""MOE_SLAB_VMM on a real GPU."""

from __future__ import annotations

import pytest

from devices.resizing_arena import grow_and_shrink
from expertier.hip.gpu.device import GpuDevice
from expertier.hip.gpu.vmm.probe import probe_vmm


def test_the_arena_grows_and_shrinks_under_its_base(device: GpuDevice) -> None:
    result = probe_vmm(device.gpu)
    if not result.passed:
        pytest.skip(f"the probe failed at «{result.failed}»: {result.detail}")
    grow_and_shrink(device)
