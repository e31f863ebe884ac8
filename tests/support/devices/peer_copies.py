"""Copies from one GPU's memory to another's."""

from __future__ import annotations

from expertier.hip.driver.runtime import Stream
from expertier.hip.gpu.device import GpuDevice


def copy_between(device: GpuDevice, target: int, source: int, n_bytes: int) -> None:
    """Copy to memory of `device` from another GPU's memory that it can access; done when it returns."""
    with Stream(device.gpu) as stream:
        device.gpu.call("copy_within", target, source, n_bytes, stream.handle)
        stream.synchronize()
