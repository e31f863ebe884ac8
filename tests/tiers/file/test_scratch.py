"""Aligned memory for direct reads, and the count of reads in flight."""

from __future__ import annotations

import pytest

from expertier.tiers.file.in_flight_reads import InFlightReads
from expertier.tiers.file.modes import page_cache
from expertier.tiers.file.reader import ReadingTerms
from expertier.tiers.file.readers import Readers
from expertier.tiers.file.scratch import ScratchPool
from limits.waits import Running


@pytest.mark.parametrize("alignment", [1, 512, 4096, 65_536])
def test_blocks_are_aligned_distinct_and_used_again(alignment: int) -> None:
    pool = ScratchPool(65_536, alignment)
    assert pool.n_bytes == 0
    with pool.block() as first, pool.block() as second:
        first[:] = b"1" * 65_536
        second[:] = b"2" * 65_536
        assert first[0] == ord("1")
        pool.check_valid()
    taken = pool.n_bytes
    assert 2 * 65_536 <= taken <= 2 * (65_536 + alignment)
    for _ in range(5):
        with pool.block():
            pool.check_valid()
    assert pool.n_bytes == taken
    pool.check_valid()
    pool.close()
    assert pool.n_bytes == 0


def test_no_more_than_the_most_and_the_next_waits() -> None:
    pool = ScratchPool(4096, 4096, max_blocks=1)

    def wait_for_one() -> None:
        with pool.block():
            pass

    with pool.block():
        running = Running(wait_for_one)
        running.must_wait_in("block")
    running.outcome()
    assert pool.n_bytes == 4096


def test_a_failed_read_returns_its_block() -> None:
    pool = ScratchPool(4096, 4096, max_blocks=1)
    with pytest.raises(OSError, match="disk"), pool.block():
        raise OSError("disk")
    with pool.block():
        pass


def test_closing_under_a_read_is_our_bug() -> None:
    pool = ScratchPool(4096, 4096)
    with pool.block(), pytest.raises(AssertionError, match="still has its block"):
        pool.close()


def test_the_last_one_out_cleans_up_once() -> None:
    cleaned: list[int] = []
    reads = InFlightReads(lambda: cleaned.append(1))
    assert reads.begin()
    assert reads.begin()
    reads.close()
    reads.close()
    assert not reads.begin()
    terms = ReadingTerms(1, lambda: 0, lambda: 0.0)
    reader = page_cache.Reader([], terms, Readers([], terms))
    reads.end(reader, 10)
    assert cleaned == []
    reads.end(None, 10)
    assert cleaned == [1]
    reads.close()
    assert cleaned == [1]
    assert (reader.n_reads, reader.bytes_read) == (1, 10)


def test_with_nobody_inside_it_is_cleaned_up_at_once() -> None:
    cleaned: list[int] = []
    reads = InFlightReads(lambda: cleaned.append(1))
    assert reads.begin()
    reads.end(None, 3)
    assert cleaned == []
    reads.close()
    assert cleaned == [1]
