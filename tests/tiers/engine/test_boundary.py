"""The boundary under a bound engine: only the engine itself moves it, and finds its new layout afterwards."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import expertier as et
from expertier.errors import BudgetError, BusyError, DeviceError
from expertier.hip.host import HostDevice
from expertier.planner.budget.allocate import floor_bytes
from expertier.testing import FaultPlan, FaultyDevice, LayerShape, PatternSource, synthetic_table
from expertier.tiers.engine.binding import bound_layer
from expertier.tiers.manager import TierManager
from limits.waits import Running

TABLE = synthetic_table([LayerShape(n_experts=8), LayerShape(types=("Q4_0", "Q4_0", "Q8_0"), n_experts=12)])
COMPUTE_BYTES = 40_000
SLOTS = 4


@pytest.fixture
def faults() -> FaultPlan:
    return FaultPlan()


@pytest.fixture
def tiers(faults: FaultPlan) -> Iterator[TierManager]:
    device = HostDevice()
    budget = sum(demand.bytes_for(SLOTS) for demand in TABLE.layer_demands())
    config = et.TierConfig(expert_cache_bytes=budget, host_pool_bytes=1 << 20, fill_threads=0)
    manager = TierManager(
        TABLE,
        device=FaultyDevice(device, faults),
        config=config,
        source=PatternSource(),
        compute_bytes=COMPUTE_BYTES,
    )
    yield manager
    faults.disarm()
    manager.check_valid()
    manager.engine.unbind()
    manager.close()
    device.close()


def assert_described(tiers: TierManager) -> None:
    """Assert that the binding says where the slots lie now."""
    now = tiers.engine.layout()
    assert now.directory_address == tiers._residency.directory_address
    assert now.n_slots.tolist() == list(tiers.slots)
    offsets = now.offsets.tolist()
    for number, layer in enumerate(TABLE.layers):
        places = tiers._slab.places(number)
        mine, offsets = offsets[: len(places)], offsets[len(places) :]
        assert mine == [place.offset for place in places]
        bound = bound_layer(layer, TABLE.slot_layouts[number], tiers.slots[number], places)
        assert [matrix.offset_from_slab_base for matrix in bound.matrices] == mine
        for copy, offset in zip(bound.copies, mine, strict=False):
            assert copy.offset_from_slab_base == offset
    assert not offsets


def test_the_budget_is_what_a_wide_batch_leaves(tiers: TierManager) -> None:
    assert tiers.engine.computes_in_slab
    assert tiers.slots == (SLOTS, SLOTS)
    assert COMPUTE_BYTES <= tiers.engine.compute_bytes < COMPUTE_BYTES + 128
    assert tiers.engine.most_compute_bytes == tiers._slab.n_bytes - floor_bytes(TABLE.layer_demands())


def test_down_and_up_again(tiers: TierManager) -> None:
    for layer in range(2):
        tiers.acquire(layer, range(SLOTS)).release()
    tiers.engine.bind()
    wide, slots = tiers.engine.compute_bytes, tiers.slots
    tiers.engine.move_boundary(1000)
    assert tiers.engine.compute_bytes == 1024
    assert all(now > before for now, before in zip(tiers.slots, slots, strict=True))
    assert [set(tiers._residency.residents(layer)) for layer in range(2)] == [set(range(SLOTS))] * 2
    assert_described(tiers)
    tiers.check_valid()
    tiers.engine.move_boundary(wide)
    assert (tiers.engine.compute_bytes, tiers.slots) == (wide, slots)
    assert_described(tiers)
    moves = tiers.stats().moves.moves
    tiers.engine.move_boundary(wide)
    assert tiers.stats().moves.moves == moves, "there was nothing to move"


def test_layers_that_lack_slots_only_for_computing() -> None:
    device = HostDevice()
    demands = TABLE.layer_demands()
    budget = sum(demand.bytes_for(demand.n_experts - 1) for demand in demands)
    config = et.TierConfig(expert_cache_bytes=budget, host_pool_bytes=0, fill_threads=0)
    for compute_bytes, n_cut in ((COMPUTE_BYTES * 2, 2), (0, 0)):
        with TierManager(
            TABLE, device=device, config=config, source=PatternSource(), compute_bytes=compute_bytes
        ) as tiers:
            assert tiers.engine.n_cut_layers == n_cut
            tiers.engine.bind()
            if compute_bytes:
                tiers.engine.move_boundary(0)
                assert tiers.slots == tuple(demand.n_experts for demand in demands)
                assert tiers.engine.n_cut_layers == 0
            tiers.engine.unbind()
    device.close()


def test_more_than_one_slot_a_layer_leaves_is_refused(tiers: TierManager) -> None:
    tiers.engine.bind()
    before = tiers.slots
    with pytest.raises(BudgetError, match="one slot a layer"):
        tiers.engine.move_boundary(tiers.engine.most_compute_bytes + 1)
    assert tiers.slots == before
    assert isinstance(tiers.engine.last_error, BudgetError)
    tiers.engine.move_boundary(tiers.engine.most_compute_bytes)
    assert min(tiers.slots) == 1


def test_nobody_else_moves_it(tiers: TierManager) -> None:
    with pytest.raises(BusyError, match="MOE_SLAB_COMPUTE"):
        tiers.reserve_compute(100)
    tiers.engine.bind()
    for change in (
        lambda: tiers.reserve_compute(100),
        lambda: tiers.apply(et.plan_layers(TABLE.layer_demands(), budget_bytes=tiers.arena_bytes)),
    ):
        with pytest.raises(BusyError):
            change()


def test_it_waits_for_leases_of_others(tiers: TierManager) -> None:
    tiers.engine.bind()
    lease = tiers.acquire(0, [1])
    with pytest.raises(BusyError, match="leases are live"):
        tiers.engine.move_boundary(1000)
    mover = Running(tiers.engine.move_boundary, 1000)
    mover.must_wait_in("move_boundary")
    lease.release()
    mover.outcome()
    assert tiers.engine.compute_bytes == 1024


def test_not_while_the_engine_fills(tiers: TierManager) -> None:
    tiers.engine.bind()
    with tiers._usage.engine_fill(), pytest.raises(BusyError):
        tiers.engine.move_boundary(1000)


@pytest.mark.parametrize("operation", ["copy_within", "zero"])
@pytest.mark.parametrize("to", [1000, 60_000])
def test_a_failed_move_changes_nothing(
    tiers: TierManager, faults: FaultPlan, to: int, operation: str
) -> None:
    for layer in range(2):
        tiers.acquire(layer, range(SLOTS)).release()
    tiers.engine.bind()
    before = tiers.slots, tiers.engine.compute_bytes
    nth = 1
    while True:
        faults.arm(operation, nth)
        try:
            tiers.engine.move_boundary(to)
        except DeviceError:
            nth += 1
        else:
            break
        assert (tiers.slots, tiers.engine.compute_bytes) == before
        assert_described(tiers)
        tiers.check_valid()
    assert nth > 1
    assert tiers.engine.compute_bytes >= to
    resident = tiers._residency.residents(0)
    assert np.array(list(resident.values())).max(initial=-1) < tiers.slots[0]
