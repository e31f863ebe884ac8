"""Experts of several sizes in one pool: each size gets its share, once, and all of the budget is used."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from expertier.tiers.host_pool.budget import HostBudget
from expertier.tiers.host_pool.fill_handle import FillHandle
from expertier.tiers.host_pool.pool import HostPool
from failures.pool_fakes import PAGE, LedgerDevice, bring, powers_of_two, whole_pages

SMALL, LARGE = PAGE, 3 * PAGE


class Sizes:
    """A pool for 40 experts of one page in layer 0 and 40 of three in layer 1."""

    def __init__(
        self, n_pages: int, *, knows: bool = True, rounding: Callable[[int], int] = whole_pages
    ) -> None:
        self.device = LedgerDevice(rounding)
        self.budget = HostBudget(n_pages * PAGE)
        self.pool = HostPool(
            self.device,
            budget_bytes=n_pages * PAGE,
            largest_block_bytes=LARGE,
            experts_by_size={SMALL: 40, LARGE: 40} if knows else None,
            budget=self.budget,
        )
        self.device.pools.append(self.pool)

    def bring(self, layer: int, expert: int) -> bool:
        hit = bring(self.pool, (layer, expert), (SMALL, LARGE)[layer])
        self.pool.check_valid()
        assert self.device.pinned_bytes == self.budget.used_bytes + self.budget.bounce_bytes
        return hit

    def bytes_by_layer(self) -> list[int]:
        """What the copies of each layer take."""
        layers = [layer for (layer, _), _ in self.pool.copies()]
        return [layers.count(0) * SMALL, layers.count(1) * LARGE]


@pytest.fixture
def close_all() -> Iterator[list[Sizes]]:
    made: list[Sizes] = []
    yield made
    for sizes in made:
        sizes.pool.close()
        assert sizes.device.live == {}


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("n_pages", [16, 40, 128])
@pytest.mark.parametrize("knows", [True, False])
def test_a_size_that_comes_late_gets_its_share_and_no_more(
    close_all: list[Sizes], first: int, n_pages: int, knows: bool
) -> None:
    sizes = Sizes(n_pages, knows=knows)
    close_all.append(sizes)
    for layer in (first, 1 - first):
        for expert in range(40):
            sizes.bring(layer, expert)
    small, large = sizes.bytes_by_layer()
    total = n_pages * PAGE
    chunk = max(LARGE, total // 32)
    assert total // 4 - chunk <= small <= total // 4 + chunk
    assert total * 3 // 4 - chunk <= large <= total * 3 // 4 + chunk
    assert sizes.pool.stats().used_bytes > total - LARGE, "room was left over"


@pytest.mark.parametrize("n_pages", [4, 5, 7, 16, 100, 131])
@pytest.mark.parametrize("rounding", [whole_pages, powers_of_two])
@pytest.mark.parametrize("knows", [True, False])
def test_sizes_do_not_take_from_each_other_for_ever(
    close_all: list[Sizes], n_pages: int, rounding: Callable[[int], int], knows: bool
) -> None:
    """After a while, misses in any order of use allocate nothing: pinning memory is slow."""
    sizes = Sizes(n_pages, knows=knows, rounding=rounding)
    close_all.append(sizes)

    def use_all() -> int:
        before = sizes.device.n_allocs
        for step in range(400):
            sizes.bring(step % 3 % 2, step * 7 % 40)
        return sizes.device.n_allocs - before

    use_all()
    use_all()
    assert use_all() == 0
    assert sizes.pool.stats().misses > 0


def test_two_runs_keep_the_same_copies(close_all: list[Sizes]) -> None:
    kept = []
    for _ in range(2):
        sizes = Sizes(37, knows=False)
        close_all.append(sizes)
        for step in range(500):
            sizes.bring(step * 5 % 7 % 2, step * step % 40)
        kept.append([key for key, _ in sizes.pool.copies()])
    assert kept[0] == kept[1]


def test_the_coldest_chunk_goes(close_all: list[Sizes]) -> None:
    sizes = Sizes(12)
    close_all.append(sizes)
    for expert in range(12):
        sizes.bring(0, expert)
    sizes.pool.touch([(0, 0), (0, 2)])
    sizes.bring(1, 0)
    there = {expert for (layer, expert), _ in sizes.pool.copies() if layer == 0}
    assert there == set(range(12)) - {1, 3, 4}


def test_a_size_takes_no_more_than_its_quota_of_a_chunk_that_was_given_up(close_all: list[Sizes]) -> None:
    sizes = Sizes(126, knows=False)
    close_all.append(sizes)
    for expert in range(42):
        sizes.bring(1, expert)
    assert sizes.pool.stats().used_bytes == 126 * PAGE
    sizes.bring(0, 0)
    assert sizes.pool.contains((0, 0))
    assert sizes.pool.stats().used_bytes == 124 * PAGE, "one expert of that size is known: it needs one page"


def test_chunks_in_use_do_not_go(close_all: list[Sizes]) -> None:
    sizes = Sizes(12)
    close_all.append(sizes)
    for expert in range(12):
        sizes.bring(0, expert)
    held = [FillHandle((0, expert), SMALL, SMALL) for expert in range(11)]
    for handle in held:
        sizes.pool.begin_fill(handle)
    before = sizes.pool.copies()
    assert not sizes.bring(1, 0)
    assert sizes.pool.copies() == before, "part of what was missing was taken"
    for handle in held:
        sizes.pool.end_fill(handle)
    sizes.bring(1, 0)
    assert sizes.pool.contains((1, 0))


def test_a_size_for_which_the_budget_has_no_block_goes_through_bounce_blocks(close_all: list[Sizes]) -> None:
    sizes = Sizes(3)
    close_all.append(sizes)
    for expert in range(5):
        sizes.bring(1, expert)
        sizes.bring(0, expert)
    assert sizes.bytes_by_layer() == [0, LARGE]


def test_an_expert_that_the_table_does_not_have_is_not_kept(close_all: list[Sizes]) -> None:
    sizes = Sizes(12)
    close_all.append(sizes)
    assert not bring(sizes.pool, (2, 0), 2 * PAGE)
    assert not bring(sizes.pool, (2, 0), 2 * PAGE)


def test_a_pool_takes_no_more_than_all_its_experts(close_all: list[Sizes]) -> None:
    sizes = Sizes(10_000)
    close_all.append(sizes)
    for _ in range(2):
        for layer in (0, 1):
            for expert in range(40):
                sizes.bring(layer, expert)
    stats = sizes.pool.stats()
    assert stats.used_bytes == 40 * (SMALL + LARGE)
    assert (stats.hits, stats.misses, stats.evictions) == (80, 80, 0)
    assert stats.rounding_bytes == 0


def test_rounding_is_reported(close_all: list[Sizes]) -> None:
    sizes = Sizes(64)
    close_all.append(sizes)
    bring(sizes.pool, (0, 0), PAGE - 96)
    bring(sizes.pool, (1, 0), LARGE - 1000)
    stats = sizes.pool.stats()
    n_small = sum(len(chunk.blocks) for chunk in sizes.pool._store.classes[PAGE].chunks.values())
    n_large = sum(len(chunk.blocks) for chunk in sizes.pool._store.classes[LARGE].chunks.values())
    assert stats.rounding_bytes == 96 * n_small + 1000 * n_large
