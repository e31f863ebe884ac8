"""Tiers on a GPU whose arena is resized, and what has to hold of them then."""

from __future__ import annotations

import expertier as et
from devices.device_contract import read
from expertier.hip.gpu.device import GpuDevice
from expertier.hip.gpu.vmm.virtual_memory import LEAST_CHUNK_BYTES
from expertier.testing import LayerShape, PatternSource, synthetic_table
from expertier.tiers.model.slot_layout import GUARD_BYTES

CHUNK = LEAST_CHUNK_BYTES
SHAPE = {"n_embd": 1024, "n_ff": 1536}
TABLE = synthetic_table(
    [
        LayerShape(n_experts=48, **SHAPE),
        LayerShape(n_experts=32, types=("Q4_0", "Q4_0", "Q6_K"), **SHAPE),
        LayerShape(n_experts=20, **SHAPE),
    ]
)
FULL_BYTES = sum(demand.bytes_for(demand.n_experts) for demand in TABLE.layer_demands())
assert 4 * CHUNK < FULL_BYTES < 5 * CHUNK


class ResizingArena:
    """A manager over a pattern on `device`, which is read through pinned memory."""

    def __init__(self, device: GpuDevice, n_bytes: int, *, vmm: bool = True) -> None:
        self.device = device
        self.source = PatternSource()
        self.stream = device.create_stream()
        config = et.TierConfig(expert_cache_bytes=n_bytes, host_pool_bytes=0, fill_threads=0, slab_vmm=vmm)
        self.tiers = et.TierManager(TABLE, device=device, config=config, source=self.source)
        self.base = self.tiers._slab.base

    @property
    def memory_bytes(self) -> int:
        return self.tiers.stats().l1.memory_bytes

    def use(self, layer: int, *experts: int) -> None:
        self.tiers.acquire(layer, experts, stream=self.stream).release()

    def residents(self) -> list[set[int]]:
        return [set(self.tiers._residency.residents(layer)) for layer in range(TABLE.n_layers)]

    def check(self) -> None:
        """Every expert has its bytes, zeros follow the last slots, and the slab is where it was."""
        self.device.synchronize()
        self.tiers.check_valid()
        assert self.tiers._slab.base == self.base, "the base moved"
        assert self.tiers.arena_bytes <= self.memory_bytes
        for layer, held in enumerate(TABLE.layers):
            places = self.tiers._slab.places(layer)
            for expert, slot in self.tiers._residency.residents(layer).items():
                for matrix, place in zip(held.matrices, places, strict=True):
                    at = self.base + place.offset + slot * place.stride
                    expected = self.source.expected(matrix.span(expert))
                    # Its ends: what moved wrongly is wrong there, and reading all of it takes long.
                    assert read(self.device, at, 256) == expected[:256], (layer, expert)
                    assert read(self.device, at + len(expected) - 256, 256) == expected[-256:], (
                        layer,
                        expert,
                    )
            last, place = held.matrices[-1], places[-1]
            end = place.offset + (self.tiers.slots[layer] - 1) * place.stride + last.expert_bytes
            assert read(self.device, self.base + end, GUARD_BYTES) == bytes(GUARD_BYTES), layer

    def close(self) -> None:
        self.tiers.close()
        self.device.destroy_stream(self.stream)


def grow_and_shrink(device: GpuDevice) -> None:
    """Give the arena other sizes while experts are in it: those that fit stay, and memory comes and goes."""
    free = device.free_bytes()
    arena = ResizingArena(device, CHUNK + CHUNK // 2)
    assert arena.memory_bytes == 2 * CHUNK
    for layer in range(TABLE.n_layers):
        arena.use(layer, 3, 5)
        arena.use(layer, 3, 5, 7)
    small, before = arena.tiers.slots, arena.residents()
    arena.tiers.resize_arena(4 * CHUNK)
    assert arena.memory_bytes == 4 * CHUNK
    assert arena.tiers.arena_bytes == arena.tiers.stats().l1.budget_bytes == 4 * CHUNK
    assert free - device.free_bytes() >= 4 * CHUNK
    assert arena.residents() == before
    assert all(now > was for now, was in zip(arena.tiers.slots, small, strict=True))
    arena.check()
    for layer in range(TABLE.n_layers):
        arena.use(layer, *range(16))  # more than the layers will have
    arena.check()
    region = arena.tiers.reserve_compute(CHUNK // 4)
    arena.tiers.resize_arena(CHUNK + CHUNK // 2)
    assert arena.memory_bytes == 2 * CHUNK
    assert free - device.free_bytes() < 3 * CHUNK, "the memory did not come back"
    assert arena.tiers.stats().l1.compute_bytes == region.n_bytes
    assert all({3, 5} <= experts for experts in arena.residents()), "the hottest stay"
    assert [len(experts) for experts in arena.residents()] == list(arena.tiers.slots)
    arena.check()
    arena.tiers.release_compute()
    arena.tiers.resize_arena(FULL_BYTES)
    assert arena.tiers.stats().l1.compute_bytes == region.n_bytes, "a resize moved the boundary"
    arena.tiers.lower_boundary()
    arena.check()
    assert arena.tiers.slots == tuple(layer.n_experts for layer in TABLE.layers)
    arena.close()
    assert device.free_bytes() > free - CHUNK
