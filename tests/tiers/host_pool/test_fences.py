"""Queued copies that still read a block (I10): it is neither overwritten nor freed, but it may be read."""

from __future__ import annotations

import pytest

from expertier.errors import DeviceError
from expertier.tiers.host_pool.budget import HostBudget
from expertier.tiers.host_pool.lent import Lent
from expertier.tiers.host_pool.pool import N_BOUNCE_BLOCKS, HostPool
from expertier.tiers.host_pool.staged import Staged
from pool_fakes import PAGE, LedgerDevice, ManualFence, bring


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

    def stage(self, expert: int) -> Staged:
        staged = Staged((0, expert), PAGE, PAGE)
        self.pool.stage(staged)
        self.pool.check_valid()
        if not staged.hit:
            assert not self.device.read_within(staged.address, PAGE), "I10"
        return staged

    def queue(self, expert: int, *, commit: bool = True) -> ManualFence:
        """A fill whose copy is queued when it leaves."""
        staged = self.stage(expert)
        if commit and not staged.hit:
            self.pool.commit(staged)
        fence = ManualFence(self.device, staged.address)
        self.pool.leave(staged, fence)
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


def test_a_block_that_was_not_committed_is_not_lent_while_it_is_read() -> None:
    pool = Pool(2)
    fence = pool.queue(0, commit=False)
    assert pool.experts == []
    bring(pool.pool, (0, 1), PAGE)
    assert fence.waited == 0, "there was another block"
    held = pool.stage(1)
    bring(pool.pool, (0, 2), PAGE)
    assert fence.waited == 1
    pool.pool.leave(held)


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
    held = pool.stage(0)
    other = pool.stage(1)
    bounced = pool.queue(5)
    pool.pool.leave(held)
    pool.pool.leave(other)
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
    staged = pool.stage(0)
    pool.pool.commit(staged)
    fence = Broken(pool.device, staged.address)
    pool.pool.leave(staged, fence)
    with pytest.raises(DeviceError):
        pool.stage(1)
    pool.pool.check_valid()
    assert pool.experts == [0]
    fence.broken = False
    pool.device.fences.clear()
    pool.stage(1)


@pytest.mark.parametrize("queued", [True, False])
def test_copies_that_are_lent_stay_until_they_are_back_and_their_copies_done(queued: bool) -> None:
    pool = Pool(3)
    for expert in range(3):
        pool.queue(expert).finish()
    lent = Lent()
    pool.pool.lend(lent, 0, [2, 9, 0])
    assert lent.indices == [0, 2], "9 is not there"
    for expert in (5, 6):  # one after another through the block that is left
        pool.queue(expert).finish()
        assert sorted(pool.experts) == [0, 2, expert]
    fence = ManualFence(pool.device, *lent.addresses) if queued else None
    pool.pool.take_back(lent, fence)
    pool.pool.take_back(lent)
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
