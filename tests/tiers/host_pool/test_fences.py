"""Queued copies that still read a block (I10): it is neither overwritten nor freed, but it may be read."""

from __future__ import annotations

import pytest

from expertier.errors import DeviceError
from expertier.tiers.host_pool.acquired_copies import AcquiredCopies
from expertier.tiers.host_pool.budget import HostBudget
from expertier.tiers.host_pool.fill_handle import FillHandle
from expertier.tiers.host_pool.pool import N_BOUNCE_BLOCKS, HostPool
from failures.pool_fakes import PAGE, LedgerDevice, ManualFence, bring


class Pool:
    """A pool of `n` pages, whose copies are queued."""

    def __init__(self, n_pages: int) -> None:
        self.device = LedgerDevice()
        self.pool = HostPool(
            self.device,
            budget_bytes=n_pages * PAGE,
            largest_block_bytes=PAGE,
            budget=HostBudget(n_pages * PAGE),
        )
        self.device.pools.append(self.pool)

    def begin_fill(self, expert: int) -> FillHandle:
        handle = FillHandle((0, expert), PAGE, PAGE)
        self.pool.begin_fill(handle)
        self.pool.check_valid()
        if not handle.hit:
            assert not self.device.read_within(handle.address, PAGE), "I10"
        return handle

    def queue(self, expert: int, *, complete: bool = True) -> ManualFence:
        """A fill whose copy is queued when the fill ends."""
        handle = self.begin_fill(expert)
        if complete and not handle.hit:
            self.pool.complete_fill(handle)
        fence = ManualFence(self.device, handle.address)
        self.pool.end_fill(handle, fence)
        self.pool.check_valid()
        return fence

    @property
    def experts(self) -> list[int]:
        return [expert for (_, expert), _ in self.pool.copies()]


def test_a_copy_that_nobody_reads_goes_before_an_older_one_that_is_read() -> None:
    pool = Pool(3)
    fences = [pool.queue(expert) for expert in range(3)]
    fences[1].finish()
    pool.queue(7)
    assert pool.experts == [0, 2, 7]
    assert [fence.waited for fence in fences] == [0, 0, 0]


def test_a_fill_waits_for_a_copy_where_all_blocks_are_read() -> None:
    pool = Pool(2)
    fences = [pool.queue(expert) for expert in range(2)]
    pool.queue(7)
    assert [fence.waited for fence in fences] == [1, 0], "the oldest was waited for"
    assert pool.experts == [1, 7]


def test_a_block_that_is_read_may_be_read_again() -> None:
    pool = Pool(2)
    first, second = pool.queue(0), pool.queue(0)
    pool.queue(1)
    first.finish()
    bring(pool.pool, (0, 2), PAGE)
    assert second.waited == 1, "the second reader was forgotten"
    assert pool.experts == [1, 2]


def test_a_block_whose_fill_was_aborted_is_not_given_away_while_it_is_read() -> None:
    pool = Pool(2)
    fence = pool.queue(0, complete=False)
    assert pool.experts == []
    bring(pool.pool, (0, 1), PAGE)
    assert fence.waited == 0, "there was another block"
    held = pool.begin_fill(1)
    bring(pool.pool, (0, 2), PAGE)
    assert fence.waited == 1
    pool.pool.end_fill(held)


def test_bounce_blocks_are_read_as_well() -> None:
    pool = Pool(0)
    fences = [pool.queue(expert) for expert in range(N_BOUNCE_BLOCKS)]
    assert [fence.waited for fence in fences] == [0] * N_BOUNCE_BLOCKS
    fences[1].finish()
    last = pool.queue(8)
    assert fences[0].waited == 0
    pool.queue(9)
    assert fences[0].waited + last.waited == 1


def test_what_is_read_is_not_given_back() -> None:
    pool = Pool(3)
    fences = [pool.queue(expert) for expert in range(3)]
    fences[2].finish()
    pool.pool.resize(0)
    assert pool.experts == [0, 1]
    fences[0].finish()
    fences[1].finish()
    bring(pool.pool, (0, 9), PAGE)
    assert pool.experts == []
    assert pool.pool.stats().used_bytes == 0


def test_close_waits_for_queued_copies() -> None:
    pool = Pool(2)
    fences = [pool.queue(expert) for expert in range(2)]
    held = pool.begin_fill(0)
    other = pool.begin_fill(1)
    bounced = pool.queue(5)
    pool.pool.end_fill(held)
    pool.pool.end_fill(other)
    pool.pool.close()
    assert [fence.waited for fence in (*fences, bounced)] == [1, 1, 1]
    assert pool.device.live == {}


def test_fences_that_are_done_are_forgotten_soon() -> None:
    """Their events are used again: a pool of thousands of blocks does not hold one each."""
    pool = Pool(50)
    for expert in range(50):
        pool.queue(expert).finish()
    chunks = pool.pool._store.classes[PAGE].chunks.values()
    held = sum(len(block.fences) for chunk in chunks for block in chunk.blocks)
    assert held <= 2
    assert len(pool.pool._fenced) <= 2


def test_a_fence_that_fails_is_an_error_of_the_fill_that_needs_the_block() -> None:
    class Broken(ManualFence):
        broken = True

        def done(self) -> bool:
            if self.broken:
                raise DeviceError("the stream failed")
            return True

    pool = Pool(1)
    handle = pool.begin_fill(0)
    pool.pool.complete_fill(handle)
    fence = Broken(pool.device, handle.address)
    pool.pool.end_fill(handle, fence)
    with pytest.raises(DeviceError):
        pool.begin_fill(1)
    pool.pool.check_valid()
    assert pool.experts == [0]
    fence.broken = False
    pool.device.fences.clear()
    pool.begin_fill(1)


@pytest.mark.parametrize("queued", [True, False])
def test_acquired_copies_stay_until_they_are_released_and_what_reads_them_is_done(queued: bool) -> None:
    pool = Pool(3)
    for expert in range(3):
        pool.queue(expert).finish()
    copies = AcquiredCopies()
    pool.pool.acquire_copies(copies, 0, [2, 9, 0])
    assert copies.indices == [0, 2], "9 is not there"
    for expert in (5, 6):  # one after another through the block that is left
        pool.queue(expert).finish()
        assert sorted(pool.experts) == [0, 2, expert]
    fence = ManualFence(pool.device, *copies.addresses) if queued else None
    pool.pool.release_copies(copies, fence)
    pool.pool.release_copies(copies)
    for expert in (7, 8, 9):
        pool.queue(expert).finish()
    assert sorted(pool.experts) == ([0, 2, 9] if queued else [7, 8, 9])
    if fence is not None:
        fence.finish()
        for expert in (1, 3, 4):
            pool.queue(expert).finish()
        assert sorted(pool.experts) == [1, 3, 4], "nothing holds them any more"
    pool.pool.check_valid()
    assert pool.pool.stats().hits == 2
