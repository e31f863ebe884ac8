"""The pool and its allocator: what it takes, how often it is asked, and what its refusals do."""

from __future__ import annotations

import threading
from itertools import pairwise

import pytest

from expertier.errors import DeviceError
from expertier.hip.faults.device import FaultyDevice
from expertier.hip.faults.plan import FaultPlan
from expertier.hip.host import HostDevice
from expertier.tiers.host_pool.budget import HostBudget
from expertier.tiers.host_pool.fill_handle import FillHandle
from expertier.tiers.host_pool.growth_pause import FIRST_PAUSE_S
from expertier.tiers.host_pool.pool import N_BOUNCE_BLOCKS, HostPool
from expertier.units import MIB
from failures.pool_fakes import PAGE, LedgerDevice, bring, powers_of_two
from limits.waits import Running


def make(
    device: LedgerDevice, budget_bytes: int, largest: int = PAGE, clock: list[float] | None = None
) -> HostPool:
    """A pool with a budget of its own."""
    now_s = clock if clock is not None else [0.0]
    pool = HostPool(
        device,
        budget_bytes=budget_bytes,
        largest_block_bytes=largest,
        budget=HostBudget(budget_bytes),
        clock=lambda: now_s[0],
    )
    device.pools.append(pool)
    return pool


@pytest.mark.parametrize("block_mib", [1.5, 5.0, 12.6])
@pytest.mark.parametrize("budget_mib", [64, 1000, 4096])
def test_row_29_rounding_to_powers_of_two_is_counted_and_wastes_little(
    block_mib: float, budget_mib: int
) -> None:
    """An allocation an expert would waste up to half of the budget, or take twice as much as is counted."""
    device, n_bytes = LedgerDevice(powers_of_two), int(block_mib * MIB)
    pool = make(device, budget_mib * MIB, n_bytes)
    bounce = device.pinned_bytes
    assert pool.stats().bounce_bytes == bounce == N_BOUNCE_BLOCKS * powers_of_two(n_bytes)
    for expert in range(2 * budget_mib * MIB // n_bytes):
        bring(pool, (0, expert), n_bytes)
        assert device.pinned_bytes - bounce == pool.stats().used_bytes <= budget_mib * MIB
    pool.check_valid()
    content = len(pool.copies()) * n_bytes
    stats = pool.stats()
    assert stats.rounding_bytes == stats.used_bytes - content <= 0.11 * stats.used_bytes
    assert content >= 0.85 * budget_mib * MIB
    pool.close()
    assert device.live == {}


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_row_21_a_refusal_is_an_error_and_no_other_memory_is_used(nth: int) -> None:
    device = LedgerDevice()
    pool = make(device, 40 * PAGE)
    failed = []
    device.faults.arm("alloc_pinned", nth)
    for expert in range(10):
        before = pool.stats()
        handle = FillHandle((0, expert), PAGE, PAGE)
        try:
            pool.begin_fill(handle)
            assert any(a <= handle.address < a + n for a, n in device.live.items()), "not pinned memory"
            pool.complete_fill(handle)
        except DeviceError:
            assert handle.block is None
            assert pool.stats().used_bytes == before.used_bytes, "the reservation stayed"
            failed.append(expert)
        finally:
            pool.end_fill(handle)
        pool.check_valid()
        assert device.pinned_bytes == pool.stats().used_bytes + pool.stats().bounce_bytes
    assert len(failed) == pool.stats().refusals == device.faults.injected["alloc_pinned"] == 1
    assert [expert for (_, expert), _ in pool.copies()] == [e for e in range(10) if e != failed[0]]


def test_a_refusal_that_lasts_fails_some_fills_and_the_others_work_with_what_is_there() -> None:
    """Locked memory has a limit, say: the pool must not fail every fill from then on."""
    now_s = [0.0]
    device = LedgerDevice()
    pool = make(device, 40 * PAGE, clock=now_s)
    for expert in range(5):
        bring(pool, (0, expert), PAGE)

    def fail_forever() -> None:
        raise DeviceError("asked for more than the limit of locked memory")

    device.faults.check = lambda *_: fail_forever()
    failures = 0
    for expert in range(5, 50):
        try:
            bring(pool, (0, expert), PAGE)
        except DeviceError:
            failures += 1
        pool.check_valid()
    assert failures == pool.stats().refusals == 2
    assert [expert for (_, expert), _ in pool.copies()] == [45, 46, 47, 48, 49]
    now_s[0] += FIRST_PAUSE_S
    with pytest.raises(DeviceError):
        bring(pool, (0, 50), PAGE)
    bring(pool, (0, 51), PAGE)
    now_s[0] += 2 * FIRST_PAUSE_S
    device.faults = FaultPlan()
    for expert in range(50, 90):
        bring(pool, (0, expert), PAGE)
    assert pool.stats().used_bytes == 40 * PAGE, "and grows again when it may"


def test_with_nothing_yet_a_refused_pool_goes_through_bounce_blocks_after_the_error() -> None:
    device = LedgerDevice()
    pool = make(device, 4 * PAGE)
    for _ in range(2):
        device.faults.arm("alloc_pinned", 1)
        with pytest.raises(DeviceError):
            bring(pool, (0, 0), PAGE)
    handle = FillHandle((0, 0), PAGE, PAGE)
    pool.begin_fill(handle)
    assert handle.bounce
    pool.end_fill(handle)


def test_an_interrupted_allocation_changes_nothing() -> None:
    device = LedgerDevice()
    pool = make(device, 4 * PAGE)
    device.faults.arm("alloc_pinned", 1, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        bring(pool, (0, 0), PAGE)
    pool.check_valid()
    assert pool.stats().refusals == 0
    assert not bring(pool, (0, 0), PAGE)
    assert bring(pool, (0, 0), PAGE)


def test_hits_go_on_and_other_misses_wait_while_a_chunk_is_allocated() -> None:
    """Pinning a chunk takes tens of milliseconds."""
    device = LedgerDevice()
    pool = make(device, 4 * PAGE)
    device.pools.clear()
    bring(pool, (0, 0), PAGE)
    allocating, may_go_on = threading.Event(), threading.Event()

    def hold() -> None:
        allocating.set()
        assert may_go_on.wait(30)

    device.after_alloc = hold
    first = Running(bring, pool, (0, 1), PAGE)
    assert allocating.wait(30)
    second = Running(bring, pool, (0, 2), PAGE)
    assert bring(pool, (0, 0), PAGE), "a hit waited"
    assert pool.stats().used_bytes == 2 * PAGE, "what is being allocated counts"
    pool.check_valid()
    second.must_wait_in("bring")
    may_go_on.set()
    assert not first.outcome()
    assert not second.outcome()
    pool.check_valid()
    assert len(pool.copies()) == 3


def test_a_miss_that_waits_for_an_allocation_goes_on_when_that_is_refused() -> None:
    device = LedgerDevice()
    pool = make(device, 4 * PAGE)
    device.pools.clear()
    allocating, may_go_on = threading.Event(), threading.Event()
    inner = device.alloc_pinned

    def refuse_late(_n_bytes: int) -> int:
        device.alloc_pinned = inner
        allocating.set()
        assert may_go_on.wait(30)
        raise DeviceError("asked for more than there is")

    device.alloc_pinned = refuse_late
    refused = Running(bring, pool, (0, 0), PAGE)
    assert allocating.wait(30)
    waiting = Running(bring, pool, (0, 1), PAGE)
    waiting.must_wait_in("bring")
    may_go_on.set()
    with pytest.raises(DeviceError, match="asked for more than there is"):
        refused.outcome()
    assert not waiting.outcome()


def test_blocks_are_pages_of_their_own_in_real_memory() -> None:
    with HostDevice() as host:
        faults = FaultPlan()
        pool = HostPool(
            FaultyDevice(host, faults),
            budget_bytes=64 * PAGE,
            largest_block_bytes=2 * PAGE,
            budget=HostBudget(64 * PAGE),
        )
        for expert in range(30):
            bring(pool, (0, expert), PAGE + 1)
        addresses = sorted(address for _, address in pool.copies())
        assert all(address % PAGE == 0 for address in addresses)
        assert all(b - a >= 2 * PAGE for a, b in pairwise(addresses))
        pool.close()
