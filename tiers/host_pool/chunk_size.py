"""How much memory the host pool asks the allocator for at a time."""

from __future__ import annotations

from collections.abc import Callable

from expertier.units import MIB, round_up

BLOCK_ALIGNMENT = 4096
"""Blocks begin at multiples of this many bytes and have such sizes, because direct reads from a disk need it."""

LARGEST_CHUNK_BYTES = 64 * MIB
"""A chunk's size in a large pool. It is not larger because pinning is slow, and a fill may wait for a whole chunk."""

CHUNKS_PER_POOL = 32
"""A smaller pool has about this many chunks, so that it does not lose much of its content with one chunk."""

MAX_WASTE = 1 / 16
"""Where the allocator's rounding wastes a larger share than this, larger chunks are considered."""

STRETCH = 4
"""Such a larger chunk may have this many times the usual size."""

STRETCH_BLOCKS = 8
"""It may have this many blocks where that is more; with up to 8 blocks one size comes close to a power of two."""


def block_size(n_bytes: int) -> int:
    """Return the size of the block that holds an expert of `n_bytes`."""
    return round_up(n_bytes, BLOCK_ALIGNMENT)


def blocks_per_chunk(
    block_bytes: int,
    allocated_bytes: Callable[[int], int],
    *,
    pool_bytes: int,
    room_bytes: int,
    most_blocks: int | None = None,
) -> int:
    """Return how many blocks the next chunk of a pool of `pool_bytes` shall have; 0 where not one block fits.

    `allocated_bytes(n)` returns what the allocator takes for n bytes. The chunk takes at most `room_bytes` and has at
    most `most_blocks`.

    Of the sizes up to the usual one, the least wasteful is chosen: an allocator that rounds up to powers of two wastes
    up to half of a chunk, but nothing of a chunk whose size is a power of two. Where all these sizes waste more than
    `MAX_WASTE`, larger ones are considered as well: up to `STRETCH` times the usual size, or `STRETCH_BLOCKS` blocks.
    """
    usual_bytes = min(LARGEST_CHUNK_BYTES, pool_bytes // CHUNKS_PER_POOL)
    usual = max(1, usual_bytes // block_bytes)
    stretched = max(STRETCH_BLOCKS, STRETCH * usual_bytes // block_bytes)
    most = room_bytes // block_bytes
    if most_blocks is not None:
        most = min(most, most_blocks)
    counts = {1, min(usual, most), min(stretched, most)}
    power = 1 << block_bytes.bit_length()
    while power <= 2 * stretched * block_bytes:
        counts.add(power // block_bytes)
        power *= 2
    costs = {
        n: cost
        for n in counts
        if 1 <= n <= min(most, stretched) and (cost := allocated_bytes(n * block_bytes)) <= room_bytes
    }
    if not costs:
        return 0

    def least_wasteful(up_to: int) -> int:
        return min((n for n in costs if n <= up_to), key=lambda n: (costs[n] / n, -n), default=0)

    best = least_wasteful(usual)
    if costs[best] > (1 + MAX_WASTE) * best * block_bytes:
        best = least_wasteful(stretched)
    return best
