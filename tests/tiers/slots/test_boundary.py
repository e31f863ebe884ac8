"""The movable boundary: whole or not at all, hottest experts stay, and no thrash between prefill and decode."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest

import expertier as et
from expertier.errors import BudgetError, BusyError, DeviceError
from expertier.hip.host import HostDevice
from expertier.testing import (
    FakeDevice,
    FaultPlan,
    FaultyDevice,
    LayerShape,
    PatternSource,
    synthetic_table,
)
from expertier.tiers.slots.slab import Slab
from limits.waits import Running

TABLE = synthetic_table(
    [LayerShape(n_experts=8), LayerShape(n_experts=12, n_ff=64), LayerShape(types=("Q4_0", "Q4_0", "Q8_0"))]
)
SLOTS = 6


class Tiers:
    """A manager over a pattern, with its parts at hand."""

    def __init__(self, *, streams: bool = False) -> None:
        self.device: FakeDevice | HostDevice = FakeDevice() if streams else HostDevice()
        self.faults = FaultPlan()
        self.source = PatternSource()
        demands = TABLE.layer_demands()
        budget = sum(demand.bytes_for(SLOTS) for demand in demands)
        config = et.TierConfig(expert_cache_bytes=budget, host_pool_bytes=1 << 20, fill_threads=0)
        self.manager = et.TierManager(
            TABLE, device=FaultyDevice(self.device, self.faults), config=config, source=self.source
        )

    @property
    def slab(self) -> Slab:
        return self.manager._slab

    def use(self, layer: int, *experts: int) -> None:
        self.manager.acquire(layer, experts).release()

    def residents(self) -> list[set[int]]:
        return [set(self.manager._residency.residents(layer)) for layer in range(TABLE.n_layers)]

    def check(self) -> None:
        self.manager.check_valid()
        if isinstance(self.device, FakeDevice):
            self.device.synchronize()
        for layer, held in enumerate(TABLE.layers):
            for expert, slot in self.manager._residency.residents(layer).items():
                for matrix, place in zip(held.matrices, self.slab.places(layer), strict=True):
                    found = ctypes.string_at(
                        self.slab.base + place.offset + slot * place.stride, matrix.expert_bytes
                    )
                    assert found == self.source.expected(matrix.span(expert)), (layer, expert)

    def close(self) -> None:
        self.manager.close()
        self.device.close()


@pytest.fixture(params=[False, True], ids=["host", "streams"])
def tiers(request: pytest.FixtureRequest) -> Iterator[Tiers]:
    tiers = Tiers(streams=request.param)
    yield tiers
    tiers.faults.disarm()
    tiers.check()
    tiers.close()


def test_the_compute_region_is_the_low_end_and_never_moves(tiers: Tiers) -> None:
    region = tiers.manager.reserve_compute(5000)
    assert region.address == tiers.slab.base
    assert region.n_bytes == 5120
    again = tiers.manager.reserve_compute(9000)
    assert (again.address, again.n_bytes) == (region.address, 9088)
    assert tiers.manager.reserve_compute(100) == again, "never less than before"
    first = min(place.offset for place in tiers.slab.places(0))
    assert first >= 9088
    stats = tiers.manager.stats().l1
    assert stats.compute_bytes + stats.used_bytes + stats.rounding_bytes == tiers.slab.n_bytes


def test_the_hottest_experts_stay_and_the_boundary_comes_back_to_where_it_was(tiers: Tiers) -> None:
    before = tiers.manager.slots
    for _ in range(4):
        for layer in range(3):
            tiers.use(layer, 1, 4)
    for layer in range(3):
        tiers.use(layer, 0, 2, 5, 6)
    full = tiers.residents()
    evictions = tiers.manager.stats().l1.evictions
    tiers.manager.reserve_compute(tiers.slab.n_bytes // 2)
    tiers.check()
    survivors = tiers.residents()
    for layer, experts in enumerate(survivors):
        assert {1, 4} <= experts < full[layer]
        assert len(experts) == tiers.manager.slots[layer] < before[layer]
    stats = tiers.manager.stats()
    dropped = sum(map(len, full)) - sum(map(len, survivors))
    assert stats.moves.dropped == dropped == stats.l1.evictions - evictions
    assert stats.moves.moves == 1
    tiers.manager.release_compute()
    assert tiers.manager.lower_boundary()
    assert not tiers.manager.lower_boundary()
    assert (tiers.manager.slots, tiers.residents()) == (before, survivors)
    tiers.check()
    misses = tiers.manager.stats().l1.misses
    for layer in range(3):
        tiers.use(layer, 1, 4)
    assert tiers.manager.stats().l1.misses == misses


def test_a_reserve_that_leaves_no_slot_says_how_much_there_is(tiers: Tiers) -> None:
    before = tiers.manager.stats()
    with pytest.raises(BudgetError, match="is the most"):
        tiers.manager.reserve_compute(tiers.slab.n_bytes)
    with pytest.raises(ValueError, match="-1 bytes"):
        tiers.manager.reserve_compute(-1)
    assert tiers.manager.stats() == before
    floor = sum(demand.bytes_for(1) for demand in TABLE.layer_demands())
    tiers.manager.reserve_compute(tiers.slab.n_bytes - floor)
    assert min(tiers.manager.slots) == 1


def test_the_boundary_goes_down_when_misses_have_cost_what_it_gives_back(tiers: Tiers) -> None:
    region = tiers.manager.reserve_compute(tiers.slab.n_bytes // 2)
    small = tiers.manager.slots
    tiers.manager.release_compute()
    start = tiers.manager.stats().l1.bytes_in
    used = 0
    while tiers.manager.slots == small:
        cost = tiers.manager.stats().l1.bytes_in - start
        assert cost < region.n_bytes + TABLE.layers[1].expert_bytes, "it should have gone down by now"
        tiers.use(1, used % 12)
        used += 1
    assert cost >= region.n_bytes
    assert tiers.manager.stats().l1.compute_bytes == 0


def test_alternating_prefill_and_decode_do_not_move_anything(tiers: Tiers) -> None:
    for _ in range(20):
        tiers.manager.reserve_compute(tiers.slab.n_bytes // 2)
        tiers.manager.release_compute()
        for layer in range(3):
            tiers.use(layer, 0, 1)
    assert tiers.manager.stats().moves.moves == 1


def test_a_release_keeps_what_it_names(tiers: Tiers) -> None:
    tiers.manager.reserve_compute(20_000)
    tiers.manager.release_compute(8000)
    tiers.manager.release_compute(9000)
    assert tiers.manager.lower_boundary()
    assert tiers.manager.stats().l1.compute_bytes == 8064


def test_leases_keep_the_boundary_where_it_is(tiers: Tiers) -> None:
    lease = tiers.manager.acquire(0, [1])
    held = lease.held
    with pytest.raises(BusyError, match="cannot reserve compute memory while 1 leases are live"):
        tiers.manager.reserve_compute(5000)
    assert lease.held is held
    lease.release()
    tiers.manager.engine.bind()
    with pytest.raises(BusyError, match="engine is bound"):
        tiers.manager.reserve_compute(5000)
    tiers.manager.engine.unbind()
    assert tiers.manager.stats().moves.moves == 0


def test_a_reserve_waits_for_another_threads_lease(tiers: Tiers) -> None:
    lease = tiers.manager.acquire(0, [1])
    waiting = Running(tiers.manager.reserve_compute, 5000)
    waiting.must_wait_in("reserve_compute")
    tiers.manager.acquire(1, [2]).release()  # the thread it waits for is let in
    lease.release()
    waiting.outcome()
    assert tiers.manager.stats().l1.compute_bytes == 5120


@pytest.mark.parametrize("operation", ["copy_within", "zero"])
@pytest.mark.parametrize("nth", [1, 2, 5])
def test_a_failed_move_leaves_the_old_boundary(tiers: Tiers, operation: str, nth: int) -> None:
    for layer in range(3):
        tiers.use(layer, *range(6))
    before, slots = tiers.residents(), tiers.manager.slots
    tiers.faults.arm(operation, nth)
    try:
        tiers.manager.reserve_compute(tiers.slab.n_bytes // 3)
    except DeviceError:
        assert tiers.manager.slots == slots
        assert tiers.manager.stats().l1.compute_bytes == 0
        assert all(now <= then for now, then in zip(tiers.residents(), before, strict=True))
        tiers.check()
        tiers.manager.reserve_compute(tiers.slab.n_bytes // 3)
    assert tiers.manager.stats().l1.compute_bytes > 0
    tiers.faults.disarm()
    for layer in range(3):
        tiers.use(layer, *range(6))


def test_zeros_that_could_not_be_restored_are_before_the_next_use(tiers: Tiers) -> None:
    for layer in range(3):
        tiers.use(layer, *range(6))

    def fail_always() -> None:
        tiers.faults.arm("zero", 1)

    fail_always()
    original = tiers.slab.still_there

    def still_there(*args: object) -> object:
        fail_always()
        return original(*args)  # type: ignore[arg-type]

    tiers.slab.still_there = still_there  # type: ignore[method-assign, assignment]
    with pytest.raises(DeviceError):
        tiers.manager.reserve_compute(tiers.slab.n_bytes // 3)
    assert tiers.slab.stale_guards
    fail_always()
    with pytest.raises(DeviceError):
        tiers.use(0, 1)
    tiers.use(0, 1)
    assert not tiers.slab.stale_guards


def test_a_plan_keeps_the_hottest_and_is_the_boundarys_from_then_on(tiers: Tiers) -> None:
    for layer in range(3):
        tiers.use(layer, *range(6))
    plan = et.LayerPlan((8, 2, 5), 0, 0)
    tiers.manager.apply(plan)
    assert tiers.manager.slots == (8, 2, 5)
    assert [len(experts) for experts in tiers.residents()] == [6, 2, 5]
    tiers.check()
    tiers.manager.reserve_compute(tiers.slab.n_bytes // 2)
    small = tiers.manager.slots
    assert small[0] > small[2] > small[1] >= 1
    tiers.manager.release_compute()
    tiers.manager.lower_boundary()
    assert tiers.manager.slots == (8, 2, 5)


def test_writers_on_a_stream_wait_for_the_move() -> None:
    tiers = Tiers(streams=True)
    device = tiers.device
    assert isinstance(device, FakeDevice)
    stream = device.create_stream()
    for layer in range(3):
        tiers.use(layer, *range(6))
    region = tiers.manager.reserve_compute(20_000, stream=stream)
    device.launch(lambda: ctypes.memset(region.address, 0xEE, region.n_bytes), stream)
    assert device.advance(stream, 99) == 0, "the region is still being left"
    device.synchronize()
    tiers.check()
    tiers.manager.close()
    device.destroy_stream(stream)
    device.close()


def test_an_engine_that_comes_after_a_failed_move_finds_zeros_where_they_belong(tiers: Tiers) -> None:
    tiers.slab.stale_guards = True
    tiers.faults.arm("zero", 1)
    with pytest.raises(DeviceError):
        tiers.manager.engine.bind()
    assert not tiers.manager._usage.bound
    tiers.manager.engine.bind()
    assert not tiers.slab.stale_guards
    tiers.manager.engine.unbind()
    tiers.manager._parts.relayout.restore_guards()  # nothing to do
    assert not tiers.faults.injected["copy_within"]


def test_a_reserve_whose_stream_cannot_be_held_waits_itself() -> None:
    """The move is made then, and must not end in an error."""
    tiers = Tiers(streams=True)
    device = tiers.device
    assert isinstance(device, FakeDevice)
    stream = device.create_stream()
    for layer in range(3):
        tiers.use(layer, *range(6))
    device.synchronize()
    original, refused = tiers.manager._fences.before_read, list[int | None]()

    def refuse_once(layer: int, slots: object, on: int | None) -> None:
        if on is not None:
            refused.append(on)
            raise DeviceError("no wait can be queued")
        original(layer, slots, on)  # type: ignore[arg-type]

    tiers.manager._fences.before_read = refuse_once  # type: ignore[method-assign]
    tiers.manager.reserve_compute(20_000, stream=stream)
    assert refused == [stream]
    assert not any(device.queued(on) for on in device.streams), "the move is still queued"
    tiers.manager._fences.before_read = original  # type: ignore[method-assign]
    tiers.check()
    tiers.manager.close()
    device.destroy_stream(stream)
    device.close()
