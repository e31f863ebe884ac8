"""How large chunks are: all of a small budget is usable, and rounding wastes little."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertier.tiers.host_pool.chunk_size import (
    LARGEST_CHUNK_BYTES,
    STRETCH,
    STRETCH_BLOCKS,
    block_size,
    blocks_per_chunk,
)
from expertier.units import GIB, MIB
from failures.pool_fakes import PAGE, powers_of_two, whole_pages


@pytest.mark.parametrize(("n_bytes", "expected"), [(1, PAGE), (PAGE, PAGE), (PAGE + 1, 2 * PAGE)])
def test_blocks_are_whole_pages(n_bytes: int, expected: int) -> None:
    assert block_size(n_bytes) == expected


def test_chunks_grow_with_the_pool_up_to_64_mib() -> None:
    def chunk(pool_bytes: int) -> int:
        block = 3 * MIB // 2
        n = blocks_per_chunk(block, whole_pages, pool_bytes=pool_bytes, room_bytes=pool_bytes)
        return n * block

    assert chunk(MIB) == 0
    assert chunk(2 * MIB) == 3 * MIB // 2
    assert chunk(320 * MIB) == 9 * MIB
    assert chunk(64 * GIB) == 63 * MIB <= LARGEST_CHUNK_BYTES


def test_the_last_chunk_takes_the_room_that_is_left() -> None:
    for room in range(9):
        n = blocks_per_chunk(2 * PAGE, whole_pages, pool_bytes=1000 * PAGE, room_bytes=room * PAGE)
        assert n == room // 2


def test_no_more_blocks_than_experts() -> None:
    assert blocks_per_chunk(PAGE, whole_pages, pool_bytes=GIB, room_bytes=GIB, most_blocks=3) == 3
    assert blocks_per_chunk(PAGE, whole_pages, pool_bytes=GIB, room_bytes=GIB, most_blocks=0) == 0


@pytest.mark.parametrize("mib", [1.01, 1.5, 3.4, 5, 12.6, 20, 24, 33, 47])
def test_an_allocator_of_powers_of_two_wastes_little(mib: float) -> None:
    """One expert at a time would waste up to half: 24 MiB take 32, 33 take 64."""
    block = block_size(int(mib * MIB))
    n = blocks_per_chunk(block, powers_of_two, pool_bytes=64 * GIB, room_bytes=64 * GIB)
    assert powers_of_two(n * block) <= 1.18 * n * block


@given(
    block=st.integers(1, 5000).map(lambda n: n * PAGE),
    pool=st.integers(0, 1 << 36),
    room=st.integers(0, 1 << 36),
    rounding=st.sampled_from([whole_pages, powers_of_two]),
    most=st.none() | st.integers(0, 100),
)
def test_a_chunk_fits_and_there_is_one_where_a_block_fits(
    block: int, pool: int, room: int, rounding: object, most: int | None
) -> None:
    n = blocks_per_chunk(block, rounding, pool_bytes=pool, room_bytes=room, most_blocks=most)
    assert (n > 0) == (rounding(block) <= room and most != 0)
    if n:
        assert rounding(n * block) <= room
        assert n <= (most or n)
        assert n * block <= max(STRETCH_BLOCKS * block, STRETCH * LARGEST_CHUNK_BYTES)
        assert rounding(n * block) / n <= rounding(block), "a single block would waste less"
