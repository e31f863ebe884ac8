"""Aligned memory for direct reads, because O_DIRECT does not accept every buffer."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from expertier.interrupts import wait_interruptibly

_MAX_BLOCKS = 16


class ScratchPool:
    """Up to `max_blocks` blocks of `block_bytes`. Each running read uses one; further reads wait for a free block.

    Blocks are made when first needed and kept until `close`. Thread-safe.
    """

    def __init__(self, block_bytes: int, alignment: int, max_blocks: int = _MAX_BLOCKS) -> None:
        """Allocate nothing yet. Blocks will begin at multiples of `alignment`, a power of two."""
        self.block_bytes = block_bytes
        self._alignment = alignment
        self._max_blocks = max_blocks
        self._changed = threading.Condition()
        self._free: list[memoryview] = []
        self._n_blocks = 0

    @property
    def n_bytes(self) -> int:
        """The bytes of memory that all blocks take."""
        return self._n_blocks * self._taken_bytes

    @contextmanager
    def block(self) -> Iterator[memoryview]:
        """Hold one block for the length of a `with` block, after waiting for one to become free."""
        with self._changed:
            while not self._free and self._n_blocks == self._max_blocks:
                wait_interruptibly(self._changed)
            if not self._free:
                self._free.append(self._make())
                self._n_blocks += 1
            block = self._free.pop()
        try:
            yield block
        finally:
            with self._changed:
                self._free.append(block)
                self._changed.notify()

    def close(self) -> None:
        """Give the memory back; no read may be using a block."""
        with self._changed:
            assert len(self._free) == self._n_blocks, "a direct read still has its block"
            self._free.clear()
            self._n_blocks = 0

    def check_valid(self) -> None:
        """Assert that blocks are within their number, distinct and aligned."""
        with self._changed:
            assert len(self._free) <= self._n_blocks <= self._max_blocks
            addresses = {_address(block) for block in self._free}
            assert len(addresses) == len(self._free), "a block was returned twice"
            assert all(address % self._alignment == 0 for address in addresses)

    @property
    def _taken_bytes(self) -> int:
        spare = self._alignment if self._alignment > mmap.PAGESIZE else 0  # a mapping begins at a page
        return self.block_bytes + spare

    def _make(self) -> memoryview:
        memory = memoryview(mmap.mmap(-1, self._taken_bytes))
        begin = -_address(memory) % self._alignment
        return memory[begin : begin + self.block_bytes]


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
