"""Runs in a process of its own, with CuPy: the steps that an integrator takes. Prints one line a step.

Used on the fake driver by `test_cupy.py` and on a real GPU by `tests/gpu`.
"""

from __future__ import annotations

import ctypes
import os
import sys
from dataclasses import dataclass

import cupy
import numpy as np
import pytest

from expertier.errors import DeviceError
from expertier.hip import open_device
from expertier.hip.driver.vendor import Vendor
from expertier.hip.gpu.cupy_interop import CupyAllocator, as_cupy, slots_as_cupy
from expertier.hip.gpu.device import GpuDevice
from expertier.hip.open import open_driver_gpu
from expertier.testing import LayerShape, PatternSource, synthetic_table
from expertier.tiers.config.config import TierConfig
from expertier.tiers.manager import TierManager


@dataclass(frozen=True)
class Matrix:
    """A lease's view of a matrix, and how many bytes the matrix has."""

    address: int
    stride_bytes: int
    matrix_bytes: int
    shape: tuple[int, int, int]


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


def experts_of_a_lease(name: str) -> None:
    """What a lease holds, as arrays on CuPy's stream: quantised matrices as bytes, others by their elements."""
    table = synthetic_table([LayerShape(), LayerShape(types=("F32", "F16", "Q8_0"))])
    source = PatternSource()
    budget = sum(demand.bytes_for(5) for demand in table.layer_demands())
    config = TierConfig(expert_cache_bytes=budget, host_pool_bytes=1 << 20)
    stream = cupy.cuda.Stream(non_blocking=True)
    with open_device(name) as device:
        tiers = TierManager(table, device=device, source=source, config=config)
        for layer, roles in ((0, {"up": None, "down": None}), (1, {"gate": np.float32, "up": np.float16})):
            with tiers.acquire(layer, [6, 1, 4], stream=stream.ptr) as lease:
                group = next(iter(lease.groups))
                for role, dtype in roles.items():
                    number = [matrix.role for matrix in table.layers[layer].matrices].index(role)
                    view, matrix = lease.view(role), table.layers[layer].matrices[number]
                    seen = Matrix(view.address, view.stride_bytes, matrix.expert_bytes, view.shape)
                    array = slots_as_cupy(seen, dtype, owner=lease)
                    assert array.data.ptr == view.address
                    for expert, slot in zip(group.experts.tolist(), group.slots.tolist(), strict=True):
                        with stream:
                            found = cupy.asnumpy(cupy.ascontiguousarray(array[slot]), stream=stream)
                        stream.synchronize()
                        if dtype is not None:
                            assert found.shape == (matrix.ne1, matrix.ne0)
                        assert found.tobytes() == source.expected(matrix.span(expert)), (layer, role, expert)
                with pytest.raises(ValueError, match="asked for a matrix of"):
                    slots_as_cupy(seen, np.float64)
        tiers.close()


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
    for step in (slots_as_arrays, experts_of_a_lease, slab_in_cupys_memory, memory_that_cupy_lacks):
        step(sys.argv[1])
        print(step.__name__, "ok")
