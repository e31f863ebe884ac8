"""Moves and zeros within a slab on one of the engine's devices: every byte arrives, with few calls of the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from expertier.engine_adapter.placement.engine_device import EngineDevice
from expertier.errors import DeviceError
from expertier.tiers.slots.moves import order_moves
from expertier.units import KIB, MIB
from fake_ggml_gpu.process import GpuSession, on_fake_gpus

NAME = "FAKE0"
SLAB_BYTES = 96 * KIB


class SlabOfBytes:
    """A slab on the fake GPU, and the bytes that must be in it."""

    def __init__(self, device: EngineDevice, n_bytes: int, rng: np.random.Generator) -> None:
        self.device = device
        self.rng = rng
        self.base = device.alloc(n_bytes)
        self.expected = rng.integers(1, 256, n_bytes, np.uint8)
        device.copy_in(self.base, self.expected.ctypes.data, n_bytes)

    def expect(self, moves: np.ndarray, zeros: np.ndarray) -> None:
        for target, source, n in moves.tolist():
            self.expected[target : target + n] = self.expected[source : source + n].copy()
        for at, n in zeros.tolist():
            self.expected[at : at + n] = 0

    def relocate(self, moves: np.ndarray, zeros: np.ndarray) -> None:
        at_moves, at_zeros = moves.copy(), zeros.copy()
        at_moves[:, :2] += self.base
        at_zeros[:, 0] += self.base
        self.device.relocate(at_moves, at_zeros)
        self.expect(moves, zeros)

    def assert_there(self) -> None:
        found = np.empty_like(self.expected)
        self.device.copy_out(found.ctypes.data, self.base, len(found))
        assert (found == self.expected).all(), np.flatnonzero(found != self.expected)[:5]


@contextmanager
def slab_of_bytes(gpus: GpuSession, n_bytes: int, seed: int) -> Iterator[SlabOfBytes]:
    """A slab with random bytes in it; at the end they are where they belong."""
    device = EngineDevice(gpus.engine.proxy, NAME)
    slab = SlabOfBytes(device, n_bytes, np.random.default_rng(seed))
    yield slab
    slab.assert_there()
    device.free(slab.base)
    device.close()


def some_moves(rng: np.random.Generator, n_bytes: int) -> np.ndarray:
    """Moves of pieces that keep their order; a piece may stay where it is."""
    n = int(rng.integers(0, 12))
    sizes = rng.integers(1, n_bytes // 12 // 2, n)
    sides = []
    for _ in range(2):
        gaps = np.diff(np.sort(rng.integers(0, n_bytes - sizes.sum() + 1, n)), prepend=0)
        begins = np.cumsum(gaps) + np.cumsum(sizes) - sizes
        sides.append(np.stack([begins, sizes, sizes], axis=1).astype(np.int64).reshape(-1, 3))
    return order_moves(*sides)


def some_zeros(rng: np.random.Generator, n_bytes: int, step: int) -> np.ndarray:
    """Small pieces to set to zero, at multiples of `step`; they may overlap."""
    n = int(rng.integers(0, 40))
    at = rng.integers(0, (n_bytes - KIB) // step, n) * step
    sizes = rng.integers(1, KIB // step + 1, n) * step
    return np.stack([at, sizes], axis=1).astype(np.int64).reshape(-1, 2)


@on_fake_gpus
def test_every_byte_is_where_it_belongs(gpus: GpuSession) -> None:
    gpus.fakes.switch(jitter_us=20, seed=1)
    with slab_of_bytes(gpus, SLAB_BYTES, seed=0) as slab:
        for round_ in range(60):
            step = [512, 128, 32, 4, 1][round_ % 5]
            slab.relocate(some_moves(slab.rng, SLAB_BYTES), some_zeros(slab.rng, SLAB_BYTES, step))
            if round_ % 3:  # a second one may follow before anybody waits
                slab.relocate(some_moves(slab.rng, SLAB_BYTES), some_zeros(slab.rng, SLAB_BYTES, 32))
            slab.device.finish()
            slab.assert_there()


@on_fake_gpus
def test_zeros_take_one_kernel_and_a_second_move_no_memory(gpus: GpuSession) -> None:
    at = np.arange(0, MIB, 4 * KIB)
    zeros = np.stack([at, np.full(len(at), 512)], axis=1).astype(np.int64)
    no_moves = np.empty((0, 3), np.int64)
    fake = gpus.fakes.devices[0]
    with slab_of_bytes(gpus, MIB, seed=1) as slab:
        for round_ in range(3):
            before = fake.counters()
            slab.relocate(no_moves, zeros)
            slab.device.finish()
            took = {name: n - before[name] for name, n in fake.counters().items()}
            assert (took["graphs"], took["nodes"]) == (1, 1)
            assert took["async_copies"] == 0
            if round_:
                assert (took["allocations"], took["live_streams"]) == (0, 0)


@on_fake_gpus
def test_what_lies_elsewhere_is_refused_and_nothing_stays_queued(gpus: GpuSession) -> None:
    none = np.empty((0, 2), np.int64)
    beyond = 1 << 50
    with slab_of_bytes(gpus, SLAB_BYTES, seed=2) as slab:
        end = slab.base + SLAB_BYTES
        moves = np.array([[slab.base + 8 * KIB, slab.base, KIB]], np.int64)
        for rows, zeros in (
            (np.concatenate([moves, [[beyond, slab.base, 64]]]), none),
            (moves, np.array([[end - 32, 64]], np.int64)),
            (moves, np.array([[slab.base - 32, 64]], np.int64)),
        ):
            with pytest.raises(DeviceError, match="move or zero"):
                slab.device.relocate(rows, zeros)
            slab.device.finish()
        slab.expect(moves - [slab.base, slab.base, 0], none)  # the first row of the first try


@pytest.mark.deep
@on_fake_gpus
def test_a_slab_of_several_windows(gpus: GpuSession) -> None:
    """Zeros on both sides of each multiple of the bytes that a kernel may be given."""
    rng = np.random.default_rng(3)
    n_bytes = (1 << 30) + 8 * MIB
    gpus.fakes.devices[0].set_memory(2 * n_bytes)
    device = EngineDevice(gpus.engine.proxy, NAME)
    base = device.alloc(n_bytes)
    edge = 1 << 30
    zeros = [edge - 4 * KIB, edge - 512, edge, edge + 32, edge + 7 * MIB, 0, edge - 32]
    rows = np.array([[at, 64 if at == edge - 32 else 512] for at in zeros], np.int64)
    begins = [0, edge - 8 * KIB, edge + 6 * MIB]
    window = rng.integers(1, 256, 2 * MIB, np.uint8)
    for begin in begins:
        device.copy_in(base + begin, window.ctypes.data, len(window))
    device.relocate(np.empty((0, 3), np.int64), rows + np.array([base, 0]))
    device.finish()
    for begin in begins:
        expected, found = window.copy(), np.empty_like(window)
        for at, n in rows.tolist():
            low, high = max(at - begin, 0), min(at + n - begin, len(window))
            if low < high:
                expected[low:high] = 0
        device.copy_out(found.ctypes.data, base + begin, len(found))
        assert (found == expected).all(), begin
    device.free(base)
    device.close()
