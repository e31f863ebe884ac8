"""What the tiers learn of demand: a profile at the start, and quotas that follow it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import expertier as et
from expertier.errors import BusyError
from expertier.hip.host import HostDevice
from expertier.planner import PolicyKind
from expertier.testing import LayerShape, PatternSource, synthetic_table
from expertier.tiers.file.byte_source import ByteSource
from expertier.tiers.host_pool.chunk_size import block_size
from failures.held_source import HeldSource
from limits.waits import Running, wait_until

TABLE = synthetic_table([LayerShape(n_experts=32), LayerShape(n_experts=32)], top_k=2)
SLOTS = 8


def make(
    policy: PolicyKind = PolicyKind.LFU_DECAY,
    *,
    pool_bytes: int = 1 << 20,
    source: ByteSource | None = None,
    threads: int = 0,
) -> et.TierManager:
    budget = sum(demand.bytes_for(SLOTS) for demand in TABLE.layer_demands())
    config = et.TierConfig(
        expert_cache_bytes=budget, host_pool_bytes=pool_bytes, fill_threads=threads, policy=policy
    )
    return et.TierManager(
        TABLE, device=HostDevice(), config=config, source=source if source is not None else PatternSource()
    )


@pytest.fixture
def tiers() -> Iterator[et.TierManager]:
    with make() as tiers:
        yield tiers
        tiers.check_valid()


def test_a_profile_fills_the_slots_with_the_most_used_experts(tiers: et.TierManager) -> None:
    uses = np.zeros((2, 32))
    uses[0, [30, 3, 20]] = [5, 9, 7]
    uses[1, :] = np.arange(32)
    assert tiers.warm_start(uses) == 3 + 31, "those beyond the slots go to L2"
    tiers.drain()
    assert set(tiers._residency.residents(0)) == {3, 20, 30}
    assert set(tiers._residency.residents(1)) == set(range(24, 32))
    assert tiers.stats().l1.misses == 0
    tiers.acquire(1, [31, 30]).release()
    assert tiers.stats().l1.hits == 2
    tiers.acquire(1, [0]).release()
    assert {30, 31} <= set(tiers._residency.residents(1)), "what the profile calls hot stays"


def test_what_slots_have_no_room_for_goes_to_the_host_pool(tiers: et.TierManager) -> None:
    uses = np.zeros((2, 32))
    uses[0, :] = np.arange(32)
    uses[1, :12] = 40
    assert tiers.warm_start(uses) == 31 + 12
    tiers.drain()
    assert set(tiers._residency.residents(1)) == set(range(8))
    reads = tiers.stats().file.reads
    for layer, experts in ((0, [23, 1]), (1, [8, 11])):
        tiers.acquire(layer, experts).release()
    assert tiers.stats().l1.misses == tiers.stats().l2.hits == 4
    assert tiers.stats().file.reads == reads, "the first misses are served from L2"
    tiers.acquire(0, [0]).release()
    assert tiers.stats().file.reads > reads, "what the profile never saw stays in the file"


def test_a_small_pool_gets_what_is_missed_most() -> None:
    size = block_size(TABLE.slot_layouts[0].block_bytes)
    with make(pool_bytes=6 * size) as tiers:
        uses = np.zeros((2, 32))
        uses[0, :] = np.arange(32)
        uses[1, :SLOTS] = 50
        assert tiers.warm_start(uses) == 2 * SLOTS + 6
        tiers.drain()
        assert {key for key, _ in tiers._pool.copies()} == {(0, expert) for expert in range(18, 24)}
        tiers.check_valid()


def test_no_pool_gets_nothing_that_a_slot_does_not_take() -> None:
    with make(pool_bytes=0) as tiers:
        tiers.acquire(0, list(range(SLOTS))).release()
        read = tiers.stats().file.bytes_read
        assert tiers.warm_start(np.full((2, 32), 9) + np.arange(32)) == 2 * SLOTS
        tiers.drain()
        assert set(tiers._residency.residents(0)) == set(range(SLOTS)), "what somebody has used stays"
        assert tiers.stats().file.bytes_read - read == SLOTS * TABLE.layers[1].expert_bytes


def test_a_move_of_the_boundary_puts_a_warm_start_off_and_does_not_end_it() -> None:
    """An engine's first batch moves it while the experts come."""
    source = HeldSource()
    with make(source=source, threads=2) as tiers:
        source.open.clear()
        asked = tiers.warm_start(np.ones((2, 32)))
        wait_until(lambda: source.reads)
        moving = Running(tiers.reserve_compute, 1 << 10)
        moving.must_wait_in("reserve_compute")
        source.open.set()
        moving.outcome()
        tiers.drain()
        stats = tiers.stats()
        assert stats.moves.moves == 1
        assert stats.prefetch.done == asked
        assert stats.prefetch.dropped == stats.prefetch.failed == 0


def test_an_engine_that_goes_waits_for_what_runs_and_not_for_the_whole_warm_start() -> None:
    source = HeldSource()
    with make(source=source, threads=2) as tiers:
        source.open.clear()
        asked = tiers.warm_start(np.ones((2, 32)))
        tiers.engine.bind()
        wait_until(lambda: source.reads >= 2)
        unbinding = Running(tiers.engine.unbind)
        unbinding.must_wait_in("unbind")
        source.let(2 * 3)
        unbinding.outcome()
        assert not tiers._usage.bound
        assert tiers.stats().prefetch.done == 2
        source.open.set()
        tiers.drain()
        assert tiers.stats().prefetch.done == asked


def test_a_profile_of_another_model_is_refused(tiers: et.TierManager) -> None:
    with pytest.raises(ValueError, match="make the profile from this model"):
        tiers.warm_start(np.ones((2, 16)))
    lease = tiers.acquire(0, [1])
    with pytest.raises(BusyError, match="take the heat of a profile"):
        tiers.warm_start(np.ones((2, 32)))
    lease.release()


def run(tiers: et.TierManager, draws: tuple[int, int], steps: int = 1500, seed: int = 0) -> int:
    """Route evenly over the first `draws[layer]` experts; return the bytes that the last third missed."""
    rng = np.random.default_rng(seed)
    before = 0
    for step in range(steps):
        if step == 2 * steps // 3:
            before = tiers.stats().l1.bytes_in
        for layer, n in enumerate(draws):
            tiers.acquire(layer, rng.choice(n, 2, replace=False).astype(np.int32)).release()
        tiers.rebalance()
    return tiers.stats().l1.bytes_in - before


def test_slots_go_to_the_layer_that_can_use_them() -> None:
    """A layer of few experts needs few slots: the others serve the layer that uses many."""
    with make() as follows, make() as stays:
        stays.rebalance = lambda: None  # type: ignore[method-assign]
        missed = run(follows, (3, 14))
        assert follows.slots[0] < SLOTS < follows.slots[1]
        assert missed < run(stays, (3, 14)) / 2
        assert follows.stats().moves.moves >= 1
        follows.check_valid()


def test_even_demand_moves_nothing() -> None:
    with make() as tiers:
        run(tiers, (14, 14))
        assert tiers.slots == (SLOTS, SLOTS)
        assert tiers.stats().moves.moves == 0


def test_a_policy_without_heat_never_moves() -> None:
    with make(PolicyKind.LRU) as tiers:
        run(tiers, (3, 14), steps=200)
        assert tiers.stats().moves.moves == 0


def test_leases_in_the_way_put_it_off(tiers: et.TierManager) -> None:
    lease = tiers.acquire(0, [0])
    run(tiers, (3, 14), steps=900)
    assert tiers.stats().moves.moves == 0
    lease.release()
    run(tiers, (3, 14), steps=60)
    assert tiers.stats().moves.moves == 1
