"""Kernels on a real GPU, against NumPy."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from devices.device_contract import moved, random_bytes, read, rows, write
from devices.kernel_checks import BLOCK_SUMS, WARP_SIZE_ATTRIBUTE
from expertier.hip.driver.libraries import load_compiler
from expertier.hip.driver.memory import PinnedBuffer
from expertier.hip.gpu.device import GpuDevice
from expertier.hip.kernels.cache import compiled
from expertier.hip.kernels.compiler import RuntimeCompiler
from expertier.hip.kernels.module import KernelModule

ARENA = 1 << 20

some_moves = st.lists(
    st.tuples(st.integers(0, ARENA - 1), st.integers(0, ARENA - 1), st.integers(0, 200_000)).filter(
        lambda move: max(move[0], move[1]) + move[2] <= ARENA
    ),
    max_size=100,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(some_moves)
def test_moves_of_any_kind(device: GpuDevice, moves: list[tuple[int, int, int]]) -> None:
    assert device.mover.kernels
    content = random_bytes(ARENA)
    address = device.alloc(ARENA)
    write(device, address, content)
    device.copy_within(rows(moves, address))
    found = read(device, address, ARENA)
    device.free(address)
    assert found == moved(content, moves)


@pytest.mark.parametrize("size", [4096, 5000, 1 << 20])
@pytest.mark.parametrize("offset", [0, 4, 3])
def test_gather(device: GpuDevice, size: int, offset: int) -> None:
    n = 70
    pinned, target = device.alloc_pinned(n * size), device.alloc(2 * n * size)
    content = random_bytes(n * size)
    ctypes.memmove(pinned, content, n * size)
    order = np.random.default_rng(1).permutation(n)
    moves = [
        (target + offset + 2 * i * size, pinned + int(expert) * size, size) for i, expert in enumerate(order)
    ]
    device.mover.gather(np.array(moves, np.int64), 0)
    found = read(device, target + offset, 2 * n * size - offset)
    device.free(pinned)
    device.free(target)
    for i, expert in enumerate(order):
        assert (
            found[2 * i * size : (2 * i + 1) * size] == content[int(expert) * size : (int(expert) + 1) * size]
        )


def test_start_up_measures_both_ways(device: GpuDevice) -> None:
    choice = device.warm_up()
    assert choice is not None
    assert {timing.count for timing in choice.timings} == {1, 2, 4, 8, 24}
    content = random_bytes(24 << 18)
    pinned, target = device.alloc_pinned(len(content)), device.alloc(len(content))
    ctypes.memmove(pinned, content, len(content))
    moves = [(target + (i << 18), pinned + (i << 18), 1 << 18) for i in range(24)]
    device.copy_in_many(np.array(moves, np.int64))
    assert read(device, target, len(content)) == content
    device.free(pinned)
    device.free(target)


def test_threads_of_a_block(device: GpuDevice) -> None:
    gpu = device.gpu
    wave = gpu.attribute(WARP_SIZE_ATTRIBUTE[gpu.driver.vendor])
    assert wave in (32, 64)
    compiler = RuntimeCompiler(gpu.driver.vendor, load_compiler(gpu.driver.vendor, gpu.driver.library))
    blocks = 1000
    with (
        KernelModule(gpu, compiled(compiler, BLOCK_SUMS, gpu.architecture())) as module,
        PinnedBuffer(gpu, blocks * 256 * 4) as source,
        PinnedBuffer(gpu, blocks * 4) as sums,
    ):
        values = source.array().view(np.uint32)
        values[:] = np.random.default_rng(0).integers(0, 1000, len(values))
        arguments = [ctypes.c_void_p(source.device_address()), ctypes.c_void_p(sums.device_address())]
        module.function("block_sums").launch((blocks, 1), 256, arguments)
        gpu.synchronize()
        expected = values.reshape(blocks, 256).sum(axis=1) * 1000 + wave
        assert (sums.array().view(np.uint32) == expected).all()
