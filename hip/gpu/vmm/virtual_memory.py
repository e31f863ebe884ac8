"""Address space to which physical memory is added, and from which it is taken away, chunk by chunk.

    base                                            base + reserved_bytes
     │ chunk 0 │ chunk 1 │ ... │   no memory yet     │
     └────────── n_bytes ──────┘
     grow_to: creates and maps a chunk at the end, and grants access to it;   shrink_to: unmaps and releases the last

Limits of drivers decide how it is done. Chunks are large, because a handle may count as an open file. A chunk is one
mapping, because a part of a mapping cannot be unmapped. And no chunk is unmapped before the work that uses it is done,
because unmapping does not wait for streams.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from expertier.errors import DriverError
from expertier.hip.driver.codes import Code
from expertier.hip.driver.gpu import Gpu
from expertier.hip.driver.ownership import Owned
from expertier.hip.driver.runtime import Stream
from expertier.hip.driver.structs import device_memory, read_write
from expertier.units import MIB, mib, round_up

LEAST_GRANULARITY_BYTES = 2 * MIB
"""The granularity where a driver reports less: ROCm 7.2 reports 4 KiB, but mappings of that size fault."""

LEAST_CHUNK_BYTES = 64 * MIB
MOST_CHUNKS = 256
"""How many chunks a range may have: well below the limit of open files, as each handle may count as one."""


class Waitable(Protocol):
    """A fence or an event: something that is done at some time."""

    def wait(self) -> None:
        """Block until it is done."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    address: int
    handle: int


def chunk_bytes_for(gpu: Gpu, reserved_bytes: int) -> int:
    """Return the size in bytes of a range's chunks: 64 MiB, or more where there would be too many chunks."""
    granularity = max(gpu.granularity(), LEAST_GRANULARITY_BYTES)
    return round_up(max(LEAST_CHUNK_BYTES, -(-reserved_bytes // MOST_CHUNKS)), granularity)


class VirtualRange(Owned):
    """A range of a GPU's addresses whose first `n_bytes` have physical memory, zeroed when new. Not thread-safe."""

    def __init__(
        self,
        gpu: Gpu,
        reserved_bytes: int,
        *,
        chunk_bytes: int | None = None,
        peers: Sequence[Gpu] = (),
        access_from_base: bool = False,
    ) -> None:
        """Reserve addresses, without memory. Raises `DriverError`.

        `chunk_bytes` is by default what `chunk_bytes_for` returns. `peers` are the other GPUs that get access to every
        chunk. With `access_from_base`, access to all chunks is granted again with each new chunk, for drivers that can
        grant access only from the range's first mapping on.
        """
        self.gpu = gpu
        self.chunk_bytes = chunk_bytes or chunk_bytes_for(gpu, reserved_bytes)
        self.reserved_bytes = round_up(reserved_bytes, self.chunk_bytes)
        self.access_from_base = access_from_base
        # The owner comes last, because some drivers keep only the access that is granted last.
        self._access = read_write([*(peer.ordinal for peer in peers), gpu.ordinal])
        self._chunks: list[_Chunk] = []
        self.address = gpu.take_memory("reserve", self.reserved_bytes, 0, None, 0, what="address space")
        self._closed = False

    @property
    def n_bytes(self) -> int:
        """How many bytes from the base on have memory."""
        return len(self._chunks) * self.chunk_bytes

    def grow_to(self, n_bytes: int) -> None:
        """Add chunks until at least the first `n_bytes` have memory. Raises `DriverError`, with nothing changed."""
        if n_bytes > self.reserved_bytes:
            raise ValueError(
                f"asked for {mib(n_bytes)} of memory, but only {mib(self.reserved_bytes)} are reserved"
            )
        before = len(self._chunks)
        try:
            while self.n_bytes < n_bytes:
                self._add_chunk()
            if self.n_bytes > before * self.chunk_bytes:
                self._clear(before)
        except BaseException:
            self._drop_chunks(before)
            raise

    def shrink_to(self, n_bytes: int, after: Iterable[Waitable] | None = None) -> None:
        """Take away the chunks that lie wholly beyond `n_bytes`, after waiting for the work that uses them.

        That is everything in `after`, by default all work of the GPU. Raises `DriverError`.
        """
        keep = -(-n_bytes // self.chunk_bytes)
        if keep >= len(self._chunks):
            return
        if after is None:
            self.gpu.synchronize()
        else:
            for waitable in after:
                waitable.wait()
        self._drop_chunks(keep)

    def _add_chunk(self) -> None:
        address = self.address + self.n_bytes
        properties = device_memory(self.gpu.ordinal)
        try:
            handle = self.gpu.handle("create", self.chunk_bytes, ctypes.byref(properties), 0)
        except DriverError as error:
            doing = f"asked {self.gpu.name} for a chunk of {mib(self.chunk_bytes)} after {len(self._chunks)} others"
            raised = self.gpu.explain(error, doing)
            if error.code == Code.OUT_OF_MEMORY and self.gpu.memory()[0] >= self.chunk_bytes:
                raised.args = (
                    f"{raised}; the memory is there: the driver may be at the limit of open files",
                )
            raise raised from error
        try:
            self.gpu.call("map", address, self.chunk_bytes, 0, handle, 0)
        except BaseException:
            self.gpu.call("release", handle)
            raise
        self._chunks.append(_Chunk(address, handle))
        begin = self.address if self.access_from_base else address
        size = self.n_bytes if self.access_from_base else self.chunk_bytes
        self.gpu.call("set_access", begin, size, self._access, len(self._access))

    def _clear(self, first: int) -> None:
        with Stream(self.gpu) as stream:
            begin = self.address + first * self.chunk_bytes
            self.gpu.call("fill", begin, 0, self.address + self.n_bytes - begin, stream.handle)
            stream.synchronize()

    def _drop_chunks(self, keep: int) -> None:
        while len(self._chunks) > keep:
            chunk = self._chunks[-1]
            self.gpu.call("unmap", chunk.address, self.chunk_bytes)
            self._chunks.pop()
            self.gpu.call("release", chunk.handle)

    def _release(self) -> None:
        # Chunks are unmapped before the addresses are given back: some drivers refuse the other order, or leak memory.
        self.shrink_to(0)
        self.gpu.call("unreserve", self.address, self.reserved_bytes)

    def __repr__(self) -> str:
        """Name the range for a message."""
        return f"VirtualRange({self.gpu.name}, {self.n_bytes} of {self.reserved_bytes} bytes at {self.address:#x})"
