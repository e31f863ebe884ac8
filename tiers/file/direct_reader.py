"""Reads past the page cache, at any offset and length and into any memory."""

from __future__ import annotations

import os

from expertier.tiers.file.dio_alignment import DioAlignment


class DirectReader:
    """Reads one file that is open with O_DIRECT.

    Expert bytes begin and end anywhere in the file, but O_DIRECT reads whole blocks only:

        file      │   block   │   block   │   block   │   block   │
        wanted            ├─────────────────────────────────┤
        read      ├ scratch ──┼──── the buffer itself ────┼ scratch ┤     where the buffer's address allows it
        read      ├───────────────────── scratch ───────────────────┤     elsewhere, and then copied

    Either way a piece takes one system call, because a second call costs more than copying a MiB.
    """

    def __init__(self, descriptor: int, alignment: DioAlignment) -> None:
        """Read from `descriptor`, which the caller keeps and closes."""
        self._descriptor = descriptor
        self._alignment = alignment

    def read(self, position: int, buffer: memoryview, address: int, scratch: memoryview) -> int:
        """Read from `position` of the file into the beginning of `buffer`; return the number of bytes read.

        As with `os.preadv` that may be fewer than the buffer's, and it is 0 at the end of the file. `address` is where
        `buffer` begins in memory. `scratch` is aligned memory of at least two blocks, each of them aligned. Raises
        `OSError`, with EINVAL where the file system does not support such reads.
        """
        block = self._alignment.offset
        lead = position % block
        head = -position % block  # wanted bytes before the first whole block
        middle = (len(buffer) - head) // block * block
        if middle > 0 and (address + head) % self._alignment.memory == 0:
            return self._read_in_place(position - lead, lead, buffer, head, middle, scratch)
        n_blocks = -(-(lead + len(buffer)) // block)
        n_pieces = -(-n_blocks // (len(scratch) // block))
        n_bytes = -(-n_blocks // n_pieces) * block  # equal pieces: a small last one would be as slow
        n_read = os.preadv(self._descriptor, [scratch[:n_bytes]], position - lead)
        n_useful = max(min(n_read - lead, len(buffer)), 0)
        buffer[:n_useful] = scratch[lead : lead + n_useful]
        return n_useful

    def _read_in_place(
        self, begin: int, lead: int, buffer: memoryview, head: int, middle: int, scratch: memoryview
    ) -> int:
        """Read whole blocks straight into `buffer`, and the blocks at its two ends into `scratch`, in one call."""
        block = self._alignment.offset
        tail = len(buffer) - head - middle
        second = max(block, self._alignment.memory)
        first = scratch[: block if head else 0]
        last = scratch[second : second + (block if tail else 0)]
        parts = [part for part in (first, buffer[head : head + middle], last) if len(part)]
        n_read = os.preadv(self._descriptor, parts, begin)
        n_useful = max(min(n_read - lead, len(buffer)), 0)
        n_head = min(head, n_useful)
        buffer[:n_head] = first[lead : lead + n_head]
        n_tail = max(n_useful - head - middle, 0)
        buffer[head + middle : head + middle + n_tail] = last[:n_tail]
        return n_useful
