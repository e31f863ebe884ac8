"""Pools that draw from one budget: what they may take together, who gives memory back, and threads."""

from __future__ import annotations

import gc
from functools import partial

import pytest

from expertier.errors import DeviceError
from expertier.hip.host import HostDevice
from expertier.tiers.host_pool.budget import HostBudget, process_budget
from expertier.tiers.host_pool.fill_handle import FillHandle
from expertier.tiers.host_pool.pool import HostPool
from failures.pool_fakes import PAGE, LedgerDevice, ManualFence, bring
from limits.at_once import run_at_once


class Pools:
    """Pools of the given pages on one budget."""

    def __init__(self, limit_pages: int | None, *pages: int) -> None:
        self.budget = HostBudget(limit_pages * PAGE if limit_pages is not None else None)
        self.device = LedgerDevice()
        self.pools = [self.make(n) for n in pages]
        self.device.pools.extend(self.pools)
        self.device.after_alloc = self.check_budget

    def make(self, n_pages: int) -> HostPool:
        return HostPool(
            self.device, budget_bytes=n_pages * PAGE, largest_block_bytes=PAGE, budget=self.budget
        )

    def check_budget(self) -> None:
        assert self.device.pinned_bytes - self.budget.bounce_bytes <= self.budget.limit_bytes, "I3"

    def fill(self, number: int, experts: range) -> None:
        for expert in experts:
            bring(self.pools[number], (0, expert), PAGE)
            self.pools[number].check_valid()

    @property
    def used(self) -> list[int]:
        assert self.device.pinned_bytes == self.budget.used_bytes + self.budget.bounce_bytes
        return [pool.stats().used_bytes // PAGE for pool in self.pools]


def test_room_is_for_whoever_asks_first_and_shares_for_whoever_comes_late() -> None:
    pools = Pools(12, 12, 12)
    pools.fill(0, range(12))
    assert pools.used == [12, 0]
    pools.fill(1, range(12))
    assert pools.used == [6, 6]
    assert [expert for (_, expert), _ in pools.pools[0].copies()] == list(range(6, 12)), "the coldest went"
    assert pools.pools[0].stats().given_back_bytes == 6 * PAGE
    pools.fill(0, range(12))
    assert pools.used == [6, 6], "pools at their shares do not take from each other"
    pools.pools[1].close()
    pools.fill(0, range(12))
    assert pools.pools[0].stats().used_bytes == 12 * PAGE
    assert pools.budget.peak_bytes == 12 * PAGE


def test_shares_are_in_proportion_to_the_claims() -> None:
    pools = Pools(12, 4, 8, 12)
    for _ in range(3):
        for number in range(3):
            pools.fill(number, range(20))
    assert pools.used == [2, 4, 6]


def test_a_pool_is_not_taken_below_its_share_by_one_that_has_something() -> None:
    pools = Pools(100, 100, 100)  # chunks of three pages, shares of fifty
    pools.fill(0, range(100))
    pools.fill(1, range(100))
    assert pools.used == [51, 49]


def test_a_pool_with_nothing_gets_a_chunk_although_it_is_larger_than_the_others_excess() -> None:
    pools = Pools(96, 96, 2)
    pools.fill(0, range(96))
    pools.fill(1, range(10))
    assert pools.used == [93, 2], "one page that was given up for it, and one that nobody had"
    pools.fill(0, range(96))
    assert pools.used == [94, 2]


def test_what_is_in_use_is_not_taken() -> None:
    pools = Pools(4, 4, 4)
    pools.fill(0, range(4))
    held = [FillHandle((0, expert), PAGE, PAGE) for expert in range(3)]
    for handle in held:
        pools.pools[0].begin_fill(handle)
    pools.fill(1, range(4))
    assert pools.used == [3, 1]
    for handle in held:
        pools.pools[0].end_fill(handle)
    pools.fill(1, range(4, 8))
    assert pools.used == [2, 2]


def test_the_limit_is_the_largest_claim_where_none_is_given() -> None:
    pools = Pools(None, 4, 10)
    assert pools.budget.limit_bytes == 10 * PAGE
    pools.fill(1, range(10))
    pools.fill(0, range(4))
    assert pools.used == [2, 8]
    pools.pools[1].close()
    assert pools.budget.limit_bytes == 4 * PAGE


def test_a_smaller_limit_is_kept_as_soon_as_blocks_are_left() -> None:
    pools = Pools(None, 4, 4, 8)
    pools.fill(0, range(4))
    pools.fill(1, range(4))
    held = FillHandle((0, 3), PAGE, PAGE)
    pools.pools[0].begin_fill(held)
    pools.pools[2].close()
    assert pools.used == [4, 4, 0], "eight pages of a limit of four, until a fill ends"
    pools.pools[0].end_fill(held)
    assert pools.used == [2, 2, 0]


def test_resizing_the_budget_shrinks_all_pools() -> None:
    pools = Pools(12, 12, 12)
    pools.fill(0, range(6))
    pools.fill(1, range(6))
    pools.budget.resize(5 * PAGE)
    assert sum(pools.used) <= 5
    assert min(pools.used) >= 2
    pools.budget.resize(0)
    assert pools.used == [0, 0]
    pools.budget.resize(12 * PAGE)
    pools.fill(0, range(12))
    assert pools.used == [12, 0]


def test_resizing_a_pool_takes_the_coldest_and_lets_it_grow_again() -> None:
    pools = Pools(12, 12)
    pools.fill(0, range(12))
    held = [FillHandle((0, expert), PAGE, PAGE) for expert in (0, 5)]
    for handle in held:
        pools.pools[0].begin_fill(handle)
    pools.pools[0].resize(4 * PAGE)
    pools.pools[0].check_valid()
    assert [expert for (_, expert), _ in pools.pools[0].copies()] == [10, 11, 0, 5]
    pools.pools[0].resize(PAGE)
    pools.pools[0].check_valid()
    assert pools.used == [2]
    pools.pools[0].end_fill(held[0])
    assert pools.used == [1]
    pools.pools[0].end_fill(held[1])
    assert pools.used == [1]
    pools.pools[0].resize(0)
    assert pools.used == [0]
    before = pools.pools[0].stats()
    pools.fill(0, range(3))
    assert pools.used == [0]
    assert pools.pools[0].stats().misses == before.misses, "a pool that is off counts no look-ups"
    pools.pools[0].resize(6 * PAGE)
    pools.fill(0, range(12))
    assert pools.used == [6]


def test_a_pool_that_was_dropped_is_not_counted_any_more() -> None:
    pools = Pools(None, 4)
    other = pools.make(9)
    assert pools.budget.limit_bytes == 9 * PAGE
    del other
    gc.collect()
    assert pools.budget.limit_bytes == 4 * PAGE


def test_pools_of_one_model_claim_together() -> None:
    """On two devices; beside another model, whose claim counts where it is larger."""
    pools = Pools(None, 5)
    model = object()
    parts = [
        HostPool(
            pools.device, budget_bytes=n * PAGE, largest_block_bytes=PAGE, budget=pools.budget, model=model
        )
        for n in (4, 3)
    ]
    pools.pools += parts
    assert pools.budget.limit_bytes == 7 * PAGE
    pools.fill(1, range(6))
    pools.fill(2, range(6))
    assert pools.used == [0, 4, 3]
    pools.fill(0, range(5))
    assert sum(pools.used) <= 7
    assert pools.used[0] >= 2, "its share beside them"
    parts[0].close()
    assert pools.budget.limit_bytes == 5 * PAGE, "the other model's is the larger now"


def test_pools_that_are_given_none_draw_from_the_process_budget() -> None:
    with HostDevice() as device:
        gc.collect()
        before = process_budget().bounce_bytes
        pool = HostPool(device, budget_bytes=3 * PAGE, largest_block_bytes=PAGE)
        assert process_budget().bounce_bytes == before + 2 * PAGE
        assert process_budget().limit_bytes >= 3 * PAGE
        pool.close()
        assert process_budget().bounce_bytes == before
    assert process_budget() is process_budget()


def test_a_pool_that_fails_to_start_leaves_no_claim() -> None:
    pools = Pools(None)
    pools.device.faults.arm("alloc_pinned", 2)
    with pytest.raises(DeviceError):
        pools.make(5)
    assert pools.budget.limit_bytes == pools.budget.bounce_bytes == 0
    assert pools.device.live == {}


# ---- threads


@pytest.mark.usefixtures("switch_often")
@pytest.mark.parametrize("limit_pages", [3, 9, 30])
def test_threads_on_two_pools_keep_the_budget_and_never_lock_up(limit_pages: int) -> None:
    """Misses that take from each other's pool, failing allocations, queued copies, resizes and new limits."""
    pools = Pools(limit_pages, 8, 20)
    pools.device.pools.clear()  # locks of other threads are held at any time
    pools.device.after_alloc = lambda: None
    limit = limit_pages * PAGE
    refused = [0] * 6
    peak = [0]

    def note_peak() -> None:
        peak[0] = max(peak[0], pools.device.pinned_bytes - pools.budget.bounce_bytes)

    pools.device.after_alloc = note_peak

    def use(seed: int) -> None:
        for step in range(250):
            pool = pools.pools[(seed + step // 5) % 2]
            n_bytes = PAGE * (1 + 2 * (step % 4 == 0))
            handle = FillHandle((n_bytes, (seed * 7 + step * (seed + 1)) % 11), n_bytes, n_bytes)
            if step % 40 == seed:
                pools.device.faults.arm("alloc_pinned", 1)
            fence = None
            try:
                pool.begin_fill(handle)
                if not handle.hit and step % 5:
                    pool.complete_fill(handle)
                if step % 3 == 0:
                    fence = ManualFence(pools.device, handle.address)
            except DeviceError:
                refused[seed] += 1
            finally:
                pool.end_fill(handle, fence)
            if fence is not None and step % 2:
                fence.finish()
            if step % 50 == 10 * seed:
                pool.resize((step % 7) * PAGE if step % 3 else 20 * PAGE)
            pool.check_valid()

    run_at_once([partial(use, seed) for seed in range(6)])
    pools.device.faults.disarm()
    assert peak[0] <= limit, "I3: by the allocator's own books"
    assert sum(refused) == pools.device.faults.injected["alloc_pinned"]
    for pool in pools.pools:
        pool.check_valid()
    assert sum(pools.used) <= limit_pages
    for pool in pools.pools:
        pool.close()
    assert pools.device.live == {}
