"""How much the host pool takes from the allocator at a time."""

from __future__ import annotations

from collections.abc import Callable

from expertier.units import MIB, round_up

BLOCK_ALIGNMENT = 4096
"""Blocks begin at, and are multiples of, this many bytes: what a direct read from a disk needs."""

LARGEST_CHUNK_BYTES = 64 * MIB
"""A chunk's size in a large pool: pinning memory is slow, and one chunk is what a fill may wait for."""

CHUNKS_PER_POOL = 32
"""A smaller pool has about so many chunks, so that giving one back does not cost it much of its content."""

MAX_WASTE = 1 / 16
"""Largest share that the allocator's rounding may waste before larger chunks are considered."""

STRETCH = 4
"""How many times the usual size such a chunk may have."""

STRETCH_BLOCKS = 8
"""How many blocks it may have where that is more: among so many sizes, one suits powers of two well enough."""


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
    """Return how many blocks the next chunk of a pool of `pool_bytes` shall have; 0 where none fits.

    `allocated_bytes` says what the allocator takes for a size; the chunk never takes more than `room_bytes`,
    and has at most `most_blocks`.
    Of the sizes up to the usual one, the least wasteful is chosen: an allocator that rounds to powers of two
    wastes up to half of a size that does not suit it, and nothing of one that does. Where all waste more than
    `MAX_WASTE`, sizes up to `STRETCH` times the usual, or `STRETCH_BLOCKS`, are considered as well.
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
