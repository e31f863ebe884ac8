"""Prefetches: never in the way, never an error, and counted as useful or wasted."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

import expertier as et
from expertier.errors import SourceError
from expertier.hip.host import HostDevice
from expertier.testing import (
    FakeDevice,
    FaultPlan,
    FaultySource,
    LayerShape,
    PatternSource,
    synthetic_table,
)
from expertier.tiers.fill.prefetcher import MAX_WAITING
from failures.held_source import HeldSource
from limits.waits import Running, wait_until, when_waiting

TABLE = synthetic_table([LayerShape(n_experts=8), LayerShape(n_experts=300)])
SLOTS = 4
SIZE = TABLE.layers[0].expert_bytes


def make(source: object, *, threads: int = 0, pool: int = 1 << 20) -> et.TierManager:
    budget = sum(demand.bytes_for(SLOTS) for demand in TABLE.layer_demands())
    config = et.TierConfig(expert_cache_bytes=budget, host_pool_bytes=pool, fill_threads=threads)
    return et.TierManager(TABLE, device=HostDevice(), config=config, source=source)  # type: ignore[arg-type]


@pytest.fixture
def tiers() -> Iterator[et.TierManager]:
    with make(PatternSource()) as tiers:
        yield tiers
        tiers.drain()
        tiers.check_valid()


def residents(tiers: et.TierManager, layer: int = 0) -> set[int]:
    return set(tiers._residency.residents(layer))


def test_what_was_prefetched_is_a_hit(tiers: et.TierManager) -> None:
    tiers.prefetch(0, [3, 5, 3])
    assert residents(tiers) == set()
    tiers.drain()
    assert residents(tiers) == {3, 5}
    tiers.acquire(0, [5]).release()
    stats = tiers.stats()
    assert (stats.l1.hits, stats.l1.misses) == (1, 0)
    assert (stats.prefetch.asked, stats.prefetch.done) == (2, 2)
    assert (stats.prefetch.useful_bytes, stats.prefetch.wasted_bytes) == (SIZE, 0)


def test_what_nobody_wanted_leaves_first_and_is_wasted(tiers: et.TierManager) -> None:
    tiers.acquire(0, [0]).release()
    tiers.prefetch(0, [5, 6])
    tiers.drain()
    tiers.acquire(0, [1, 2, 3]).release()
    assert residents(tiers) == {0, 1, 2, 3}
    stats = tiers.stats().prefetch
    assert (stats.useful_bytes, stats.wasted_bytes) == (0, 2 * SIZE)


def test_a_lease_is_never_evicted_and_a_full_layer_is_left_alone(tiers: et.TierManager) -> None:
    lease = tiers.acquire(0, [0, 1, 2, 3])
    tiers.prefetch(0, [4, 5])
    tiers.drain()
    assert residents(tiers) == {0, 1, 2, 3}
    assert tiers.stats().prefetch.dropped == 2
    lease.release()


def test_an_expert_that_is_there_is_not_asked_for(tiers: et.TierManager) -> None:
    tiers.acquire(0, [1]).release()
    tiers.prefetch(0, [1])
    tiers.drain()
    assert tiers.stats().prefetch.asked == 0


def test_into_the_host_pool_only(tiers: et.TierManager) -> None:
    tiers.prefetch(0, [1, 2], into="l2")
    tiers.drain()
    assert residents(tiers) == set()
    reads = tiers.stats().file.reads
    tiers.prefetch(0, [2], into="l2")
    tiers.acquire(0, [1, 2]).release()
    assert tiers.stats().file.reads == reads
    assert tiers.stats().l2.hits == 2
    assert tiers.stats().prefetch.asked == 2


def test_a_failure_is_counted_and_not_raised() -> None:
    faults = FaultPlan()
    with make(FaultySource(PatternSource(), faults)) as tiers:
        faults.arm("read", 1)
        tiers.prefetch(0, [1, 2])
        tiers.drain()
        assert residents(tiers) == {2}
        assert (tiers.stats().prefetch.failed, tiers.stats().prefetch.done) == (1, 1)
        tiers.check_valid()
        tiers.acquire(0, [1]).release()
        faults.arm("read", 1)
        with pytest.raises(SourceError):
            tiers.acquire(0, [7])


def test_what_the_model_does_not_have_is_left_out(tiers: et.TierManager) -> None:
    tiers.prefetch(0, [8, 1, -1])
    tiers.prefetch(2, [0])
    tiers.prefetch(-1, [0])
    tiers.drain()
    assert residents(tiers) == {1}
    assert tiers.stats().prefetch.dropped == 4
    with pytest.raises(ValueError, match="l3"):
        tiers.prefetch(0, [1], into="l3")


def test_nothing_happens_after_a_close() -> None:
    tiers = make(PatternSource())
    tiers.close()
    tiers.prefetch(0, [1])
    tiers.drain()
    assert tiers.cancel_prefetches() == 0


def test_cancelled_prefetches_leave_no_trace(tiers: et.TierManager) -> None:
    tiers.prefetch(0, [1, 2])
    tiers.prefetch(1, [1, 2, 3])
    assert tiers.cancel_prefetches(1) == 3
    assert tiers.cancel_prefetches() == 2
    tiers.drain()
    assert residents(tiers) == residents(tiers, 1) == set()
    assert tiers.stats().prefetch.dropped == 5
    tiers.prefetch(0, [1])
    tiers.drain()
    assert residents(tiers) == {1}, "it can be asked for again"


def test_no_more_wait_than_there_may(tiers: et.TierManager) -> None:
    tiers.prefetch(1, range(300))
    assert tiers.stats().prefetch.dropped == 300 - MAX_WAITING
    assert tiers.cancel_prefetches() == MAX_WAITING


def test_demand_waits_for_a_prefetch_of_its_expert_and_reads_nothing_twice() -> None:
    source = HeldSource()
    with make(source, threads=2) as tiers:
        source.open.clear()
        tiers.prefetch(0, [1])
        wait_until(lambda: source.reads)
        asking = Running(tiers.acquire, 0, [1])
        asking.must_wait_in("acquire")
        source.open.set()
        lease = asking.outcome()
        assert source.reads == 3, "one read a matrix"
        lease.release()
        assert tiers.stats().prefetch.useful_bytes == SIZE


def test_demand_does_not_wait_for_prefetches_of_others() -> None:
    source = HeldSource()
    with make(source, threads=1) as tiers:
        tiers.acquire(0, [7]).release()
        source.open.clear()
        tiers.prefetch(0, [1, 2, 3])
        wait_until(lambda: source.reads > 3)
        before = source.reads
        tiers.acquire(0, [7]).release()
        asking = Running(tiers.acquire, 1, [0])
        wait_until(lambda: source.reads > before, "demand did not begin to read")
        source.open.set()
        asking.outcome().release()
        tiers.drain()


def test_a_holder_of_leases_waits_for_a_slot_that_a_prefetch_fills() -> None:
    """A prefetch's slot is unpinned when it ends, whatever others hold: so waiting for it is no deadlock (I13)."""
    source = HeldSource()
    with make(source, threads=1) as tiers:
        held = tiers.acquire(0, [0, 1, 2])
        before = source.reads
        source.open.clear()
        tiers.prefetch(0, [5])
        wait_until(lambda: source.reads > before)
        opening = when_waiting(threading.current_thread(), "acquire", source.open.set)
        lease = tiers.acquire(0, [6])  # the layer's only other slot is the prefetch's
        opening.outcome()
        lease.release()
        held.release()


def test_a_boundary_move_does_not_wait_for_what_has_not_begun() -> None:
    source = HeldSource()
    with make(source, threads=1) as tiers:
        source.open.clear()
        tiers.prefetch(0, [1, 2, 3])
        wait_until(lambda: source.reads)
        moving = Running(tiers.reserve_compute, 2000)
        moving.must_wait_in("reserve_compute")  # the one that runs writes to a slot
        source.open.set()
        moving.outcome()
        tiers.drain()
        tiers.check_valid()


def test_close_does_not_wait_for_what_has_not_begun() -> None:
    source = HeldSource()
    tiers = make(source, threads=1)
    source.open.clear()
    tiers.prefetch(0, [1, 2, 3])
    wait_until(lambda: source.reads)
    opening = when_waiting(threading.current_thread(), "close", source.open.set)
    tiers.close()
    opening.outcome()
    assert source.reads <= 6
    assert tiers._device.device_bytes == tiers._device.pinned_bytes == 0


def test_an_interrupt_of_a_drain_ends_it_and_is_counted() -> None:
    faults = FaultPlan()
    with make(FaultySource(PatternSource(), faults)) as tiers:
        tiers.prefetch(0, [1, 2])
        faults.arm("read", 1, KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            tiers.drain()
        assert tiers.stats().prefetch.failed == 1
        assert residents(tiers) == set()
        tiers.drain()
        assert residents(tiers) == {2}
        tiers.check_valid()


def test_an_engine_is_not_unbound_while_a_prefetch_runs() -> None:
    source = HeldSource()
    with make(source, threads=1) as tiers:
        tiers.engine.bind()
        source.open.clear()
        tiers.prefetch(0, [1])
        wait_until(lambda: source.reads)
        unbinding = Running(tiers.engine.unbind)
        unbinding.must_wait_in("unbind")  # its pin could have been taken for the engine's
        source.open.set()
        unbinding.outcome()
        assert not tiers._usage.bound
        tiers.drain()
        assert residents(tiers) == {1}


def test_what_is_ready_while_an_engine_is_bound_is_not_a_copy_that_is_queued() -> None:
    """The engine reads it at once, on whatever stream; a lease alone would have its stream wait (I8)."""
    budget = sum(demand.bytes_for(SLOTS) for demand in TABLE.layer_demands())
    config = et.TierConfig(expert_cache_bytes=budget, host_pool_bytes=1 << 20, fill_threads=0)
    device = FakeDevice()
    tiers = et.TierManager(TABLE, device=device, config=config, source=PatternSource())

    def something_is_queued() -> bool:
        return any(device.queued(stream) for stream in device.streams)

    with tiers.acquire(0, [0], stream=0):
        assert something_is_queued(), "without an engine nobody waits"
    tiers.engine.bind()
    assert not something_is_queued()
    with tiers.acquire(0, [1], stream=0):
        assert not something_is_queued()
    tiers.prefetch(0, [2])
    tiers.drain()
    assert residents(tiers) == {0, 1, 2}
    assert not something_is_queued()
    tiers.engine.unbind()
    tiers.close()
    device.close()
