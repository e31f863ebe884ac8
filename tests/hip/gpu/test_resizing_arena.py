"""MOE_SLAB_VMM: the tiers' slab in virtual memory, on the fake drivers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import expertier as et
from devices.resizing_arena import CHUNK, FULL_BYTES, TABLE, ResizingArena, grow_and_shrink
from devices.vendors import quick_on_hip
from expertier.errors import BudgetError, BusyError, DeviceError
from expertier.hip.driver.vendor import Vendor
from expertier.hip.fake import FakeDriver
from expertier.hip.gpu.device import GpuDevice
from expertier.hip.gpu.vmm.probe import ProbeStep
from expertier.testing import PatternSource

OpenFake = Callable[..., GpuDevice]
UNMAP = {Vendor.HIP: "hipMemUnmap", Vendor.CUDA: "cuMemUnmap"}
CREATE = {Vendor.HIP: "hipMemCreate", Vendor.CUDA: "cuMemCreate"}
LAUNCH = {Vendor.HIP: "hipModuleLaunchKernel", Vendor.CUDA: "cuLaunchKernel"}


@pytest.fixture
def device(open_fake: OpenFake) -> Iterator[GpuDevice]:
    with open_fake() as device:
        yield device


@quick_on_hip
@pytest.mark.parametrize("quirk", [None, "first_mapping_only", "whole_unmap_only", "unfenced_unmap"])
def test_the_arena_grows_and_shrinks_under_its_base(
    fake: FakeDriver, device: GpuDevice, quirk: str | None
) -> None:
    if quirk is not None:
        fake.set(quirk, 1)
    fake.set("jitter_us", 500)
    grow_and_shrink(device)
    assert fake.get("faults") == 0


@pytest.mark.parametrize(
    ("quirk", "value", "step"),
    [
        ("vmm", 0, ProbeStep.SUPPORT),
        ("vram_stays_reserved", 1, ProbeStep.RELEASE),
        ("stale_reads", 1, ProbeStep.READ_BACK),
    ],
)
def test_a_probe_that_fails_leaves_a_plain_slab(
    fake: FakeDriver,
    device: GpuDevice,
    caplog: pytest.LogCaptureFixture,
    quirk: str,
    value: int,
    step: ProbeStep,
) -> None:
    fake.set(quirk, value)
    with caplog.at_level(logging.WARNING, "expertier"):
        arena = ResizingArena(device, CHUNK)
    assert f"failed its probe at the step «{step}»" in caplog.text
    check_keeps_its_size(arena)


def test_without_the_variable_the_slab_is_plain(device: GpuDevice) -> None:
    check_keeps_its_size(ResizingArena(device, CHUNK, vmm=False))


def check_keeps_its_size(arena: ResizingArena) -> None:
    """It works, and other sizes are refused before anything moves."""
    arena.use(0, 1, 2, 3)
    before = arena.residents()
    for n_bytes in (CHUNK // 2, 2 * CHUNK):
        with pytest.raises(DeviceError, match="MOE_SLAB_VMM=1"):
            arena.tiers.resize_arena(n_bytes)
    arena.tiers.resize_arena(CHUNK)
    assert arena.residents() == before
    assert arena.tiers.arena_bytes == arena.memory_bytes == CHUNK
    arena.check()
    arena.close()


def test_the_host_has_no_virtual_memory_to_manage(caplog: pytest.LogCaptureFixture) -> None:
    config = et.TierConfig(expert_cache_bytes=CHUNK, host_pool_bytes=0, slab_vmm=True)
    with (
        caplog.at_level(logging.WARNING, "expertier"),
        et.open_device("host") as device,
        et.TierManager(TABLE, device=device, config=config, source=PatternSource()) as tiers,
    ):
        assert "host has no virtual memory management" in caplog.text
        with pytest.raises(DeviceError, match="one plain allocation"):
            tiers.resize_arena(CHUNK // 2)


def test_a_resize_that_is_refused_changes_nothing(device: GpuDevice) -> None:
    arena = ResizingArena(device, CHUNK)
    arena.use(1, 0, 1)
    arena.tiers.reserve_compute(CHUNK // 4)
    before = arena.residents(), arena.tiers.slots, arena.tiers.stats()
    with pytest.raises(DeviceError, match="its addresses end at"):
        arena.tiers.resize_arena(FULL_BYTES + CHUNK)
    with pytest.raises(BudgetError, match="one slot in each of 3 layers"):
        arena.tiers.resize_arena(1)
    with pytest.raises(BudgetError, match="are left for expert slots"):
        arena.tiers.resize_arena(CHUNK // 4 + CHUNK // 16)
    with arena.tiers.acquire(0, [5], stream=arena.stream), pytest.raises(BusyError, match="resize the arena"):
        arena.tiers.resize_arena(2 * CHUNK)
    arena.tiers.engine.bind()
    with pytest.raises(BusyError, match="engine"):
        arena.tiers.resize_arena(2 * CHUNK)
    arena.tiers.engine.unbind()
    arena.use(0, 5)
    after = arena.residents(), arena.tiers.slots, arena.tiers.stats()
    assert after[1] == before[1]
    assert after[0][1:] == before[0][1:]
    assert after[2].l1.memory_bytes == before[2].l1.memory_bytes
    assert after[2].moves == before[2].moves
    arena.check()
    arena.close()


def test_memory_that_cannot_be_had_leaves_the_arena_as_it_was(
    fake: FakeDriver, vendor: Vendor, device: GpuDevice
) -> None:
    arena = ResizingArena(device, CHUNK)
    arena.use(0, 4, 2)
    before, slots, memory = arena.residents(), arena.tiers.slots, arena.memory_bytes
    fake.fail(CREATE[vendor], nth=2)
    with pytest.raises(DeviceError, match="asked"):
        arena.tiers.resize_arena(4 * CHUNK)
    assert (arena.residents(), arena.tiers.slots, arena.memory_bytes) == (before, slots, memory)
    arena.check()
    arena.tiers.resize_arena(4 * CHUNK)
    arena.check()
    arena.close()


def test_a_move_that_fails_gives_the_new_memory_back(
    fake: FakeDriver, vendor: Vendor, device: GpuDevice
) -> None:
    arena = ResizingArena(device, CHUNK)
    for layer in range(TABLE.n_layers):
        arena.use(layer, 4, 2)
    quotas, memory = arena.tiers._boundary.quotas, arena.memory_bytes
    fake.fail(LAUNCH[vendor])
    with pytest.raises(DeviceError):
        arena.tiers.resize_arena(4 * CHUNK)
    assert arena.memory_bytes == memory
    assert arena.tiers._boundary.quotas == arena.tiers.slots == quotas
    assert arena.tiers.arena_bytes == CHUNK
    arena.check()
    arena.tiers.resize_arena(4 * CHUNK)
    arena.check()
    arena.close()


def test_memory_that_cannot_be_given_back_is_said_and_tried_again(
    fake: FakeDriver, vendor: Vendor, device: GpuDevice, caplog: pytest.LogCaptureFixture
) -> None:
    arena = ResizingArena(device, 4 * CHUNK)
    arena.use(0, *range(8))
    fake.fail(UNMAP[vendor])
    with caplog.at_level(logging.WARNING, "expertier"):
        arena.tiers.resize_arena(CHUNK)
    assert "could not be given back" in caplog.text
    assert arena.memory_bytes == 4 * CHUNK
    assert arena.tiers.arena_bytes == CHUNK
    arena.check()
    arena.tiers.resize_arena(CHUNK)
    assert arena.memory_bytes == CHUNK
    arena.check()
    arena.close()


steps = st.lists(
    st.tuples(
        st.sampled_from(["use", "use", "resize", "reserve", "release", "lower_boundary"]),
        st.integers(0, 40),
        st.sampled_from([None, None, None, 1, 2, 3]),
    ),
    min_size=3,
    max_size=12,
)


@quick_on_hip
@settings(
    max_examples=max(5, settings().max_examples // 10),
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(steps=steps)
def test_any_order_of_moves_and_sizes_keeps_the_bytes(
    fake: FakeDriver, vendor: Vendor, device: GpuDevice, steps: list[tuple[str, int, int | None]]
) -> None:
    """With launches of moves that fail now and then (I11, I12)."""
    arena = ResizingArena(device, CHUNK)
    rng = np.random.default_rng(0)
    try:
        for what, number, nth in steps:
            before = arena.tiers.slots, arena.tiers.arena_bytes, arena.tiers.stats().l1.compute_bytes
            if nth is not None and what != "use":
                fake.fail(LAUNCH[vendor], nth=nth)
            try:
                act(arena, what, number, rng)
            except BudgetError:
                pass
            except DeviceError:
                now = arena.tiers.slots, arena.tiers.arena_bytes, arena.tiers.stats().l1.compute_bytes
                assert now == before, "I12: failed, and something changed"
            fake.fail(LAUNCH[vendor], nth=0)
            arena.check()
    finally:
        fake.fail(LAUNCH[vendor], nth=0)
        arena.close()


def act(arena: ResizingArena, what: str, number: int, rng: np.random.Generator) -> None:
    tiers = arena.tiers
    if what == "use":
        layer = number % TABLE.n_layers
        n = min(tiers.slots[layer], 6)
        arena.use(layer, *rng.permutation(TABLE.layers[layer].n_experts)[:n].tolist())
    elif what == "resize":
        tiers.resize_arena(CHUNK // 4 + number * CHUNK // 10)
    elif what == "reserve":
        tiers.reserve_compute(tiers.arena_bytes * number // 50)
    elif what == "release":
        tiers.release_compute(number * CHUNK // 100)
    else:
        tiers.lower_boundary()
