"""Virtual memory on a real GPU, after its probe."""

from __future__ import annotations

import pytest

from devices.device_contract import random_bytes, read, write
from expertier.hip.fence import Fences
from expertier.hip.gpu.device import GpuDevice
from expertier.hip.gpu.slab_memory import VmmSlabMemory, open_slab_memory
from expertier.hip.gpu.vmm.probe import probe_vmm
from expertier.hip.gpu.vmm.virtual_memory import LEAST_CHUNK_BYTES

CHUNK = LEAST_CHUNK_BYTES


def test_a_slab_grows_and_shrinks_under_its_base(device: GpuDevice) -> None:
    result = probe_vmm(device.gpu)
    if not result.passed:
        pytest.skip(f"the probe failed at «{result.failed}»: {result.detail}")
    free = device.free_bytes()
    slab = open_slab_memory(device, 2 * CHUNK, vmm=True, capacity_bytes=16 * CHUNK)
    assert isinstance(slab, VmmSlabMemory)
    assert free - device.free_bytes() >= 2 * CHUNK
    base, content = slab.base, random_bytes(1 << 20)
    write(device, base + CHUNK - (1 << 19), content)  # across two chunks
    fences, stream = Fences(device), device.create_stream()
    for n_chunks in (16, 3, 9, 2, 16, 2):
        slab.resize(n_chunks * CHUNK, after=[fences.after(stream)])
        assert slab.base == base
        assert slab.n_bytes == device.device_bytes == n_chunks * CHUNK
        end = base + slab.n_bytes - 4096
        assert read(device, end, 4096) == bytes(4096)
        device.zero(end, 4096, stream)
        assert read(device, base + CHUNK - (1 << 19), 1 << 20) == content
        used = free - device.free_bytes()
        assert n_chunks * CHUNK <= used < (n_chunks + 1) * CHUNK
    fences.close()
    slab.close()
    assert device.free_bytes() > free - CHUNK
