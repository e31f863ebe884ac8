"""Moves many pieces of memory in few launches: within the device, and from pinned host memory to it."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Mapping
from contextlib import ExitStack

import numpy as np

from expertier.errors import DeviceError, DriverError
from expertier.hip.device import Moves
from expertier.hip.driver.gpu import Gpu
from expertier.hip.driver.libraries import load_compiler
from expertier.hip.driver.memory import DeviceBuffer, PinnedBuffer
from expertier.hip.driver.runtime import Event
from expertier.hip.gpu.moves.plan import MovePlan, Scratch, plan_in_order, plan_moves
from expertier.hip.kernels.cache import compiled, kernel_source
from expertier.hip.kernels.compiler import RuntimeCompiler
from expertier.hip.kernels.module import KernelModule
from expertier.hip.zeros import Pieces
from expertier.units import MIB

_log = logging.getLogger(__name__)

SCRATCH_BYTES = 16 * MIB
ROWS_BY_VALUE = 64
REPACK_CHUNK_BYTES = 16 << 10
GATHER_CHUNK_BYTES = 16 << 10
ZERO_BYTES = 4 << 10
"""The longest piece that one row zeroes; a longer piece takes several rows."""

_THREADS = 256
_TABLE_ROWS = 16_384
_ROW_BYTES = 24
_TABLES = 2
_MOST_ROWS = 65_535  # the largest second dimension of a grid


class _Table:
    """A table of rows, written in pinned memory and copied to the device; it is free when its event is done."""

    def __init__(self, gpu: Gpu, owned: ExitStack) -> None:
        size = _TABLE_ROWS * _ROW_BYTES
        self.host = owned.enter_context(PinnedBuffer(gpu, size))
        self.device = owned.enter_context(DeviceBuffer(gpu, size))
        self.free = owned.enter_context(Event(gpu))
        self.rows = self.host.array().view(np.int64).reshape(-1, 3)


class Mover:
    """Does moves on a GPU with kernels, or with the driver's copies where kernels cannot be compiled. Thread-safe.

    It owns SCRATCH_BYTES of device memory, some zeros and two small tables. No budget of the tiers counts this memory;
    `overhead_bytes` is its size.
    """

    def __init__(
        self,
        gpu: Gpu,
        *,
        scratch_bytes: int = SCRATCH_BYTES,
        kernels: bool = True,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        """Take scratch memory, and compile the kernels; where that fails, log the reason and work without kernels.

        Raises `DeviceError` where there is no memory.
        """
        self._gpu = gpu
        self._lock = threading.Lock()
        with ExitStack() as owned:
            self._scratch_memory = owned.enter_context(DeviceBuffer(gpu, scratch_bytes))
            self._scratch = Scratch(self._scratch_memory.address, scratch_bytes)
            self._scratch_free = owned.enter_context(Event(gpu))
            self._zeros = owned.enter_context(DeviceBuffer(gpu, ZERO_BYTES))
            gpu.call("fill", self._zeros.address, 0, ZERO_BYTES, 0)
            gpu.synchronize()  # later users of the zeros are on other streams, which do not wait for stream 0
            self._tables = [_Table(gpu, owned) for _ in range(_TABLES)]
            self.kernels = False
            self.without_kernels_because = "switched off"
            if kernels:
                self._load_kernels(owned, environ)
            self._next_table = 0
            self._owned = owned.pop_all()

    @property
    def overhead_bytes(self) -> int:
        """The bytes of device memory that the mover itself takes."""
        return self._scratch.n_bytes + ZERO_BYTES + _TABLES * _TABLE_ROWS * _ROW_BYTES

    def move(self, moves: Moves, stream: int, *, chunk_bytes: int = REPACK_CHUNK_BYTES) -> None:
        """Queue moves within the device, with the result of doing them one after another. Raises `DriverError`.

        A block of threads copies `chunk_bytes`.
        """
        plan = (plan_moves if self.kernels else plan_in_order)(moves, self._scratch)
        with self._lock:
            if plan.uses_scratch:
                # Moves on another stream may still use the scratch memory.
                self._gpu.call("stream_wait_event", stream, self._scratch_free.handle, 0)
            try:
                self._launch(plan, stream, chunk_bytes)
            finally:
                if plan.uses_scratch:
                    self._record_or_wait(self._scratch_free, stream)

    def zero(self, pieces: Pieces, stream: int) -> None:
        """Queue zeroing of device memory, rows of (address, bytes): one launch, or without kernels a fill for each row.

        Meant for small pieces. Raises `DriverError`.
        """
        if not self.kernels:
            for address, n_bytes in pieces.tolist():
                self._gpu.call("fill", address, 0, n_bytes, stream)
            return
        counts = -(-pieces[:, 1] // ZERO_BYTES)
        row = np.repeat(np.arange(len(pieces)), counts)
        begins = (np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)) * ZERO_BYTES
        rows = np.empty((len(row), 3), np.int64)
        rows[:, 0] = pieces[row, 0] + begins
        rows[:, 1] = self._zeros.address
        rows[:, 2] = np.minimum(pieces[row, 1] - begins, ZERO_BYTES)
        if len(rows):
            with self._lock:
                self._launch(MovePlan(rows, (len(rows),), False), stream, ZERO_BYTES)

    def gather(self, rows: Moves, stream: int, *, chunk_bytes: int = GATHER_CHUNK_BYTES) -> None:
        """Queue copies from pinned host memory to places on the device that do not overlap, done by a kernel."""
        assert self.kernels, "gather without kernels"
        for begin in range(0, len(rows), ROWS_BY_VALUE):
            self._launch_by_value(rows[begin : begin + ROWS_BY_VALUE], stream, chunk_bytes)

    def close(self) -> None:
        """Give all memory back; a second call does nothing."""
        self._owned.close()

    def _load_kernels(self, owned: ExitStack, environ: Mapping[str, str]) -> None:
        try:
            driver = self._gpu.driver
            compiler = RuntimeCompiler(driver.vendor, load_compiler(driver.vendor, driver.library, environ))
            code = compiled(compiler, kernel_source("moves.cu"), self._gpu.architecture())
            module = owned.enter_context(KernelModule(self._gpu, code))
            self._from_table = module.function("move_rows")
            self._by_value = module.function("move_rows_by_value")
        except DeviceError as error:
            self.without_kernels_because = str(error)
            _log.warning(
                "%s: no kernels (%s); moves are done by the driver's copies, one for each piece",
                self._gpu.name,
                error,
            )
            return
        self.kernels = True
        self.without_kernels_because = ""

    def _record_or_wait(self, event: Event, stream: int) -> None:
        """Record `event`; where that fails, wait for the stream, so that nothing is used again too early."""
        try:
            event.record(stream)
        except DriverError as error:
            _log.warning("%s: %s; waiting for the stream instead", self._gpu.name, error)
            self._gpu.call("stream_synchronize", stream)

    def _launch(self, plan: MovePlan, stream: int, chunk_bytes: int) -> None:
        """Queue the launches of a plan; the caller holds the lock."""
        if not self.kernels:
            for target, source, n_bytes in plan.rows.tolist():
                self._gpu.call("copy_within", target, source, n_bytes, stream)
        elif len(plan.rows) <= ROWS_BY_VALUE:
            for rows in plan.launches():
                self._launch_by_value(rows, stream, chunk_bytes)
        else:
            self._launch_from_tables(plan, stream, chunk_bytes)

    def _launch_by_value(self, rows: Moves, stream: int, chunk_bytes: int) -> None:
        values = (ctypes.c_int64 * (3 * ROWS_BY_VALUE))(*rows.ravel().tolist())
        arguments = (values, ctypes.c_uint(len(rows)), ctypes.c_uint(chunk_bytes))
        grid = (-(-int(rows[:, 2].max()) // chunk_bytes), len(rows))
        self._by_value.launch(grid, _THREADS, arguments, stream)

    def _launch_from_tables(self, plan: MovePlan, stream: int, chunk_bytes: int) -> None:
        for begin in range(0, len(plan.rows), _TABLE_ROWS):
            end = min(begin + _TABLE_ROWS, len(plan.rows))
            table = self._tables[self._next_table]
            self._next_table = (self._next_table + 1) % _TABLES
            table.free.synchronize()
            table.rows[: end - begin] = plan.rows[begin:end]
            try:
                self._gpu.call(
                    "copy_in", table.device.address, table.host.address, (end - begin) * _ROW_BYTES, stream
                )
                first = begin
                for launch_end in plan.ends:
                    if first < launch_end and first < end:
                        last = min(launch_end, end)
                        rows = plan.rows[first:last]
                        self._launch_piece(table, rows, first - begin, stream, chunk_bytes)
                        first = last
            finally:
                self._record_or_wait(table.free, stream)

    def _launch_piece(self, table: _Table, rows: Moves, first: int, stream: int, chunk_bytes: int) -> None:
        chunks = -(-int(rows[:, 2].max()) // chunk_bytes)
        arguments = (
            ctypes.c_void_p(table.device.address),
            ctypes.c_uint(first),
            ctypes.c_uint(len(rows)),
            ctypes.c_uint(chunk_bytes),
        )
        self._from_table.launch((chunks, min(len(rows), _MOST_ROWS)), _THREADS, arguments, stream)
