"""L2's copies as C++ sees them: what is being read stays, what was read is young, what goes is found no more."""

from __future__ import annotations

import mmap
from collections.abc import Iterator

import pytest

from expertier.hip.host import HostDevice
from expertier.tiers.host_pool.copy_directory import CopyDirectory
from expertier.tiers.host_pool.fill_handle import FillHandle
from expertier.tiers.host_pool.pool import HostPool

PAGE = mmap.PAGESIZE
N_EXPERTS = 8


class Shared:
    """A pool of three pages with a directory, and the engine's side of it."""

    def __init__(self) -> None:
        self.device = HostDevice()
        self.directory = CopyDirectory([N_EXPERTS, N_EXPERTS])
        self.pool = HostPool(
            self.device,
            budget_bytes=3 * PAGE,
            largest_block_bytes=PAGE,
            experts_by_size={PAGE: 2 * N_EXPERTS},
            directory=self.directory,
        )

    def bring(self, expert: int, layer: int = 0) -> bool:
        handle = FillHandle((layer, expert), PAGE, PAGE)
        self.pool.begin_fill(handle)
        if not handle.hit:
            self.pool.complete_fill(handle)
        self.pool.end_fill(handle)
        self.check()
        return handle.hit

    def begin_read(self, expert: int) -> bool:
        """What the plugin does under the lock; whether there is a copy."""
        if not self.directory.address_of((0, expert)):
            return False
        self.directory._readers[expert] += 1
        self.directory._used[expert] = 1
        self.directory._hits[0] += 1
        return True

    def end_read(self, expert: int) -> None:
        self.directory._readers[expert] -= 1

    def there(self) -> list[int]:
        """The experts of layer 0 with copies, oldest first."""
        return [expert for (layer, expert), _ in self.pool.copies() if layer == 0]

    def check(self) -> None:
        """Exactly the complete copies can be found, where they are."""
        self.pool.check_valid()
        copies = dict(self.pool.copies())
        for layer in (0, 1):
            for expert in range(N_EXPERTS):
                address = self.directory.address_of((layer, expert))
                assert address == copies.get((layer, expert), 0), (layer, expert)
        assert self.directory.n_published() == len(copies)


@pytest.fixture
def shared() -> Iterator[Shared]:
    shared = Shared()
    yield shared
    shared.check()
    shared.pool.close()
    assert shared.directory.n_published() == 0, "the memory is gone, and its addresses are still there"
    shared.directory.close()
    shared.device.close()


def test_complete_copies_are_found_and_evicted_ones_are_not(shared: Shared) -> None:
    for expert in range(3):
        assert not shared.bring(expert)
    assert shared.begin_read(1)
    shared.end_read(1)
    assert not shared.begin_read(5)
    shared.bring(5, layer=1)
    assert shared.there() == [1, 2], "expert 0 was the oldest"
    assert not shared.begin_read(0)


def test_what_the_engine_read_is_young(shared: Shared) -> None:
    for expert in range(3):
        shared.bring(expert)
    assert shared.begin_read(0)
    shared.end_read(0)
    shared.bring(3)
    assert shared.there() == [2, 0, 3], "expert 1 went, and not the oldest, which was read"
    shared.bring(4)
    assert shared.there() == [0, 3, 4], "one read is one use"
    shared.bring(5)
    assert shared.there() == [3, 4, 5]


def test_what_the_engine_reads_is_not_evicted(shared: Shared) -> None:
    for expert in range(3):
        shared.bring(expert)
    assert shared.begin_read(0)
    shared.directory._used[0] = 0
    for expert in range(3, 7):
        shared.bring(expert)
    assert 0 in shared.there()
    shared.end_read(0)
    for expert in range(1, 4):
        shared.bring(expert)
    assert 0 not in shared.there()


def test_a_read_that_begins_while_its_copy_is_chosen_keeps_it(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at its readers and its retraction; here the look is always a moment too early."""
    for expert in range(3):
        shared.bring(expert)
    assert shared.begin_read(0)
    shared.directory._used[0] = 0
    asked: list[tuple[int, int]] = []

    def is_read(key: tuple[int, int]) -> bool:
        asked.append(key)
        return len(asked) > 1 and key == (0, 0)

    monkeypatch.setattr(shared.directory, "is_read", is_read)
    shared.bring(3)
    assert shared.there() == [0, 2, 3]
    monkeypatch.undo()
    shared.end_read(0)


def test_chunks_with_readers_are_not_given_back_until_these_are_done(shared: Shared) -> None:
    for expert in range(3):
        shared.bring(expert)
    assert shared.begin_read(1)
    shared.pool.resize(0)
    assert 1 in shared.there()
    assert shared.pool.stats().used_bytes >= PAGE
    shared.end_read(1)
    shared.pool.resize(0)
    assert shared.there() == []
    assert shared.pool.stats().used_bytes == 0
