"""Runs in a process of its own, with CuPy: the steps that an integrator takes. Prints one line a step.

Used on the fake driver by `test_cupy.py` and on a real GPU by `tests/gpu`.
"""

from __future__ import annotations

import ctypes
import os
import sys

import cupy
import numpy as np
import pytest

from expertier.errors import DeviceError
from expertier.hip import open_device
from expertier.hip.choose import open_driver_gpu
from expertier.hip.cupy_interop import CupyAllocator, as_cupy
from expertier.hip.gpu_device import GpuDevice
from expertier.hip.vendor import Vendor

SLOTS, STRIDE, USED = 6, 4096 + 256, 4096


def slots_as_arrays(name: str) -> None:
    """A layer's slots are an array without a copy, gaps left out; CuPy's stream drives our copies."""
    with open_device(name) as device:
        slab, staging = device.alloc(SLOTS * STRIDE), device.alloc_pinned(SLOTS * STRIDE)
        content = np.random.default_rng(0).integers(0, 256, SLOTS * STRIDE, np.uint8)
        ctypes.memmove(staging, content.ctypes.data, content.nbytes)
        stream = cupy.cuda.Stream(non_blocking=True)
        device.copy_in(slab, staging, content.nbytes, stream)
        layer = as_cupy(slab, (SLOTS, USED), strides=(STRIDE, 1), owner=device)
        assert layer.data.ptr == slab
        with stream:
            seen = cupy.asnumpy(cupy.ascontiguousarray(layer[3]), stream=stream)
        stream.synchronize()
        expected = content.reshape(SLOTS, STRIDE)
        assert (seen == expected[3, :USED]).all()
        words = as_cupy(slab, (SLOTS, USED // 4), np.uint32, strides=(STRIDE, 4))
        assert (cupy.asnumpy(cupy.ascontiguousarray(words[5])) == expected[5, :USED].view(np.uint32)).all()
        device.free(slab)
        device.free(staging)


def slab_in_cupys_memory(name: str) -> None:
    """What `alloc` returns is CuPy's: it is counted in its pool, zeroed, and goes back there."""
    vendor, _, ordinal = name.partition(":")
    pool = cupy.get_default_memory_pool()
    before = pool.used_bytes()
    gpu = open_driver_gpu(Vendor(vendor), int(ordinal), os.environ)
    with GpuDevice(gpu, allocator=CupyAllocator(int(ordinal))) as device:
        slab = device.alloc(5 << 20)
        assert device.device_bytes == 6 << 20
        assert pool.used_bytes() - before >= 6 << 20
        array = as_cupy(slab, (5 << 20,))
        assert not cupy.asnumpy(array).any()
        moves = np.array([[slab + (1 << 20), slab, 1 << 20]])
        array[: 1 << 20] = cupy.asarray(np.full(1 << 20, 7, np.uint8))
        cupy.cuda.runtime.deviceSynchronize()
        device.copy_within(moves)
        device.synchronize()
        assert (cupy.asnumpy(array[1 << 20 : 2 << 20]) == 7).all()
        del array
        device.free(slab)
    assert pool.used_bytes() == before
    pool.free_all_blocks()


def memory_that_cupy_lacks(name: str) -> None:
    """CuPy's out-of-memory is an error of ours."""
    vendor, _, ordinal = name.partition(":")
    gpu = open_driver_gpu(Vendor(vendor), int(ordinal), os.environ)
    with (
        GpuDevice(gpu, allocator=CupyAllocator(int(ordinal))) as device,
        pytest.raises(DeviceError, match="asked CuPy for"),
    ):
        device.alloc(1 << 45)


if __name__ == "__main__":
    for step in (slots_as_arrays, slab_in_cupys_memory, memory_that_cupy_lacks):
        step(sys.argv[1])
        print(step.__name__, "ok")
