"""The host pool: the budget at every instant, the order of eviction, two-phase fills, and several threads."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from functools import partial

import pytest

from expertier.errors import DeviceError
from expertier.hip.faults.device import FaultyDevice
from expertier.hip.faults.plan import FaultPlan
from expertier.hip.host import HostDevice
from expertier.tiers.host_pool.fill_handle import FillHandle
from expertier.tiers.host_pool.pool import N_BOUNCE_BLOCKS, HostPool
from limits.at_once import run_at_once
from limits.waits import Running

PAGE = mmap.PAGESIZE
EXPERT = 3000


class Pool:
    """A pool of `n` pages on a device whose allocations can fail."""

    def __init__(self, n_pages: int, largest: int = EXPERT) -> None:
        self.faults = FaultPlan()
        self.host = HostDevice()
        self.pool = HostPool(
            FaultyDevice(self.host, self.faults), budget_bytes=n_pages * PAGE, largest_block_bytes=largest
        )

    def begin_fill(self, expert: int, n_bytes: int = EXPERT) -> FillHandle:
        handle = FillHandle((0, expert), n_bytes, n_bytes)
        self.pool.begin_fill(handle)
        self.check()
        return handle

    def bring(self, expert: int, n_bytes: int = EXPERT) -> bool:
        """Begin and end a fill; whether the pool had a copy."""
        handle = self.begin_fill(expert, n_bytes)
        if not handle.hit:
            self.pool.complete_fill(handle)
        self.pool.end_fill(handle)
        self.check()
        return handle.hit

    def check(self) -> None:
        self.pool.check_valid()
        stats = self.pool.stats()
        assert self.host.pinned_bytes == stats.used_bytes + stats.bounce_bytes

    @property
    def experts(self) -> list[int]:
        return [expert for (_, expert), _ in self.pool.copies()]


@pytest.fixture
def three() -> Iterator[Pool]:
    """A pool of three pages; it must give all of them back."""
    pool = Pool(3)
    yield pool
    pool.pool.close()
    pool.pool.close()
    pool.host.close()


def test_the_oldest_goes_first_and_a_hit_makes_young(three: Pool) -> None:
    assert [three.bring(expert) for expert in (0, 1, 2)] == [False] * 3
    assert three.bring(0)
    assert not three.bring(3)
    assert three.experts == [2, 0, 3]
    stats = three.pool.stats()
    assert (stats.hits, stats.misses, stats.evictions, stats.bytes_in) == (1, 4, 1, 4 * EXPERT)
    assert stats.used_bytes == stats.peak_bytes == stats.budget_bytes == 3 * PAGE


def test_eviction_from_l1_makes_young(three: Pool) -> None:
    for expert in (0, 1, 2):
        three.bring(expert)
    three.pool.touch([(0, 0), (0, 77)])
    three.bring(3)
    assert three.experts == [2, 0, 3]


def test_a_fill_that_was_not_committed_leaves_nothing(three: Pool) -> None:
    handle = three.begin_fill(5)
    three.pool.end_fill(handle)
    three.pool.end_fill(handle)
    three.check()
    assert three.experts == []
    assert three.pool.stats().used_bytes == PAGE, "the free block waits for the next fill"
    three.bring(6)
    assert three.pool.stats().used_bytes == PAGE
    assert three.pool.stats().bytes_in == EXPERT


def test_end_fill_before_begin_fill_is_harmless(three: Pool) -> None:
    three.pool.end_fill(FillHandle((0, 1), EXPERT, EXPERT))
    three.check()


def test_blocks_in_use_stay_and_fills_bounce_when_all_are(three: Pool) -> None:
    for expert in (0, 1, 2):
        three.bring(expert)
    using = [three.begin_fill(0), three.begin_fill(1), three.begin_fill(9)]
    assert [handle.hit for handle in using] == [True, True, False]
    bounced = three.begin_fill(4)
    assert bounced.bounce
    three.pool.complete_fill(bounced)
    three.pool.end_fill(bounced)
    assert 4 not in three.experts
    for handle in using:
        three.pool.end_fill(handle)
    three.check()
    assert set(three.experts) == {0, 1}


def test_two_uses_of_one_copy(three: Pool) -> None:
    three.bring(0)
    first, second = three.begin_fill(0), three.begin_fill(0)
    assert first.hit
    assert first.address == second.address
    three.pool.end_fill(first)
    three.bring(1)
    three.bring(2)
    three.bring(3)
    assert 0 in three.experts, "a copy that a fill reads from was evicted"
    three.pool.end_fill(second)


def test_blocks_of_another_size_are_given_back_before_the_budget_is_exceeded() -> None:
    pool = Pool(4, largest=3 * PAGE)
    pool.bring(0)
    pool.bring(1)
    pool.bring(2, 2 * PAGE)
    assert pool.pool.stats().used_bytes == 4 * PAGE
    pool.bring(3, 3 * PAGE)
    assert pool.pool.stats().used_bytes <= 4 * PAGE
    assert 3 in pool.experts
    pool.bring(4)
    assert pool.pool.stats().peak_bytes <= 4 * PAGE


def test_a_budget_below_one_expert_keeps_nothing() -> None:
    pool = Pool(1, largest=2 * PAGE)
    handle = pool.begin_fill(0, 2 * PAGE)
    assert handle.bounce
    pool.pool.end_fill(handle)
    assert pool.pool.stats().used_bytes == 0
    assert pool.pool.stats().misses == 1


def test_off_counts_no_lookups() -> None:
    pool = Pool(0)
    assert [pool.bring(0), pool.bring(0)] == [False, False]
    stats = pool.pool.stats()
    assert (stats.hits, stats.misses, stats.used_bytes, stats.bytes_in) == (0, 0, 0, 0)
    assert stats.bounce_bytes == N_BOUNCE_BLOCKS * PAGE


def test_a_failed_allocation_is_an_error_and_the_next_works(three: Pool) -> None:
    three.bring(0)
    three.faults.arm("alloc_pinned", 1)
    with pytest.raises(DeviceError, match="alloc_pinned"):
        three.begin_fill(1)
    three.check()
    assert three.experts == [0]
    three.bring(1)
    assert three.experts == [0, 1]


@pytest.mark.parametrize("nth", range(1, N_BOUNCE_BLOCKS + 1))
def test_a_failed_start_leaves_no_memory(nth: int) -> None:
    host = HostDevice()
    with pytest.raises(DeviceError):
        HostPool(FaultyDevice(host, FaultPlan({"alloc_pinned": nth})), budget_bytes=0, largest_block_bytes=10)
    host.close()


def test_more_fills_than_bounce_blocks_wait() -> None:
    pool = Pool(0)
    held = [pool.begin_fill(expert) for expert in range(N_BOUNCE_BLOCKS)]

    def third() -> None:
        handle = FillHandle((0, 9), EXPERT, EXPERT)
        pool.pool.begin_fill(handle)
        pool.pool.end_fill(handle)

    running = Running(third)
    running.must_wait_in("begin_fill")
    pool.pool.end_fill(held.pop())
    running.outcome()
    pool.pool.end_fill(held.pop())
    pool.check()


@pytest.mark.parametrize("succeeds", [True, False])
def test_one_expert_is_read_once_at_a_time(three: Pool, succeeds: bool) -> None:
    first = three.begin_fill(7)
    results: list[bool] = []

    def second() -> None:
        handle = FillHandle((0, 7), EXPERT, EXPERT)
        three.pool.begin_fill(handle)
        results.append(handle.hit)
        three.pool.end_fill(handle)

    running = Running(second)
    running.must_wait_in("begin_fill")  # the second waits for the first
    if succeeds:
        three.pool.complete_fill(first)
    three.pool.end_fill(first)
    running.outcome()
    assert results == [succeeds]
    three.check()


def test_a_copy_may_be_used_as_soon_as_its_bytes_are_complete(three: Pool) -> None:
    first = three.begin_fill(7)
    second = Running(three.bring, 7)
    second.must_wait_in("bring")
    three.pool.complete_fill(first)
    assert second.outcome(), "the second waits until the first has copied"
    three.pool.end_fill(first)


def test_many_threads_keep_the_budget() -> None:
    pool = Pool(5)

    def use(seed: int) -> None:
        for step in range(300):
            handle = FillHandle((0, (seed * 7 + step * (seed + 1)) % 13), EXPERT, EXPERT)
            try:
                pool.pool.begin_fill(handle)
                if not handle.hit and step % 5:
                    pool.pool.complete_fill(handle)
            finally:
                pool.pool.end_fill(handle)
            if step % 20 == 0:
                pool.pool.check_valid()

    run_at_once([partial(use, seed) for seed in range(6)])
    pool.check()
    stats = pool.pool.stats()
    assert stats.hits + stats.misses == 6 * 300
    pool.pool.close()
    pool.host.close()
