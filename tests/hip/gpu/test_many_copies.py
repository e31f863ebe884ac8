"""Many copies in one call: the right ones, in order, up to the first that fails, and without Python's lock."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import expertier as et
from devices.device_contract import random_bytes, read
from expertier.errors import DeviceError, DriverError
from expertier.hip.device import Moves
from expertier.hip.driver.vendor import Vendor
from expertier.hip.fake import FakeDriver
from expertier.hip.gpu.device import GpuDevice
from expertier.hip.gpu.moves.copy_loop import CopyLoop, _interpreted, copy_loop
from expertier.hip.gpu.moves.many_copies import ManyCopies
from expertier.testing import LayerShape, PatternSource, synthetic_table
from expertier.tiers.config.budget import all_copies_bytes
from limits.waits import joined

OpenFake = Callable[..., GpuDevice]

COPY = {Vendor.CUDA: "cuMemcpyHtoDAsync_v2", Vendor.HIP: "hipMemcpyHtoDAsync"}
SIZE, N = 1000, 8

_POINTER = ctypes.c_void_p
_COPY = ctypes.CFUNCTYPE(ctypes.c_int, _POINTER, _POINTER, ctypes.c_size_t, _POINTER)

rows = st.lists(
    st.tuples(st.integers(1, 2**63 - 1), st.integers(1, 2**63 - 1), st.integers(0, 2**62)), max_size=40
)


class Batch:
    """Pinned memory, a target on the device, and the moves that bring all of it in, in another order."""

    def __init__(self, device: GpuDevice) -> None:
        self.device = device
        self.content = random_bytes(N * SIZE)
        self.pinned, self.target = device.alloc_pinned(N * SIZE), device.alloc(N * SIZE)
        ctypes.memmove(self.pinned, self.content, N * SIZE)
        self.order = [3, 0, 7, 1, 6, 2, 5, 4]
        self.moves: Moves = np.array(
            [(self.target + i * SIZE, self.pinned + i * SIZE, SIZE) for i in self.order], np.int64
        )

    def arrived(self) -> list[int]:
        """Return which pieces are there; the others have to be zero still."""
        found = read(self.device, self.target, N * SIZE)
        pieces = [slice(i * SIZE, (i + 1) * SIZE) for i in range(N)]
        there = [i for i, piece in enumerate(pieces) if found[piece] == self.content[piece]]
        assert all(found[pieces[i]] == bytes(SIZE) for i in set(range(N)) - set(there))
        return there

    def close(self) -> None:
        self.device.free(self.pinned)
        self.device.free(self.target)


@given(moves=rows, fails_at=st.integers(0, 50), code=st.integers(1, 999), stream=st.integers(0, 2**62))
def test_the_loop_makes_the_calls_up_to_the_one_that_fails(
    moves: list[tuple[int, int, int]], fails_at: int, code: int, stream: int
) -> None:
    def calls_of(loop: CopyLoop) -> tuple[int, list[tuple[int, ...]]]:
        seen: list[tuple[int, ...]] = []

        def copy(target: int, source: int, n_bytes: int, on: int | None) -> int:
            seen.append((target, source, n_bytes, on or 0))
            return code if len(seen) > fails_at else 0

        function = _COPY(copy)
        address = ctypes.cast(function, _POINTER).value
        assert address is not None
        return loop(address, np.array(moves, np.int64).reshape(-1, 3), stream), seen

    n_calls = min(len(moves), fails_at + 1)
    expected = (code if fails_at < len(moves) else 0, [(*row, stream) for row in moves[:n_calls]])
    assert calls_of(copy_loop()) == expected
    assert calls_of(_interpreted) == expected


@pytest.mark.parametrize("loop", [copy_loop, lambda: _interpreted], ids=["compiled", "interpreted"])
def test_other_threads_run_while_copies_are_queued(loop: Callable[[], CopyLoop]) -> None:
    """Copies that block until another Python thread has done something: it must get to it."""
    libc: Any = ctypes.CDLL(None)
    semaphore, deadline = ctypes.create_string_buffer(64), (ctypes.c_long * 2)(int(time.time()) + 20, 0)
    libc.sem_init(semaphore, 0, 0)
    moves = np.array([[ctypes.addressof(semaphore), ctypes.addressof(deadline), 0]] * 3, np.int64)
    address = ctypes.cast(libc.sem_timedwait, _POINTER).value
    assert address is not None
    codes: list[int] = []
    made = loop()
    thread = threading.Thread(target=lambda: codes.append(made(address, moves, 0)), daemon=True)
    thread.start()
    for _ in range(3):
        libc.sem_post(semaphore)
        left = ctypes.c_int(1)
        while left.value and thread.is_alive():  # so that the next copy blocks before it may go on
            libc.sem_getvalue(semaphore, ctypes.byref(left))
    joined(thread)
    assert codes == [0]


def test_a_batch_brings_every_piece(fake: FakeDriver, open_fake: OpenFake) -> None:
    with open_fake() as device:
        batch = Batch(device)
        before = fake.get("copies_in")
        ManyCopies(device).copy_in(batch.moves)
        assert batch.arrived() == list(range(N))
        assert fake.get("copies_in") - before == N
        batch.close()


@pytest.mark.parametrize("nth", range(1, N + 1))
def test_nothing_is_queued_after_the_copy_that_fails(
    fake: FakeDriver, vendor: Vendor, open_fake: OpenFake, nth: int
) -> None:
    with open_fake() as device:
        batch = Batch(device)
        fake.fail(COPY[vendor], nth, 999)
        with pytest.raises(DriverError, match=f"{COPY[vendor]} returned 999") as caught:
            device.copy_in_many(batch.moves)
        assert (caught.value.call, caught.value.code) == (COPY[vendor], 999)
        fake.reset()
        assert batch.arrived() == sorted(batch.order[: nth - 1])
        device.copy_in_many(batch.moves)
        assert batch.arrived() == list(range(N))
        batch.close()


def test_memory_that_is_not_pinned_is_found_in_a_batch(fake: FakeDriver, open_fake: OpenFake) -> None:
    with open_fake() as device:
        batch = Batch(device)
        for row, source in ((0, 64), (5, batch.pinned + N * SIZE - SIZE + 4096), (7, batch.pinned - 1)):
            moves = batch.moves.copy()
            moves[row, 1] = source
            with pytest.raises(
                DeviceError, match=rf"copy {SIZE} bytes from {source:#x}, which is not pinned"
            ):
                device.copy_in_many(moves)
        assert batch.arrived() == []
        assert fake.get("pageable_copies") == 0
        batch.close()


@pytest.mark.parametrize("types", [("Q4_0",) * 3, ("Q4_0", "Q4_0", "Q8_0")], ids=["one piece", "arrays"])
@pytest.mark.parametrize("nth", [1, 2, 4, 6])
def test_tiers_take_back_a_batch_that_the_driver_refused(
    fake: FakeDriver, vendor: Vendor, open_fake: OpenFake, nth: int, types: tuple[str, str, str]
) -> None:
    table, source, slots = synthetic_table([LayerShape(12, types=types)]), PatternSource(5), 6
    config = et.TierConfig(
        expert_cache_bytes=sum(demand.bytes_for(slots) for demand in table.layer_demands()),
        host_pool_bytes=4 * all_copies_bytes(table),
    )
    fake.set("jitter_us", 300)
    with open_fake() as device, et.TierManager(table, device=device, config=config, source=source) as tiers:
        for first in (0, slots):
            tiers.acquire(0, range(first, first + slots)).release()
        reads, filled = tiers.stats().file.reads, tiers.stats().l1.bytes_in
        fake.fail(COPY[vendor], nth, 999)
        with pytest.raises(DriverError, match="returned 999"):
            tiers.acquire(0, range(slots))
        fake.fail(COPY[vendor], 0)
        assert tiers._residency.pins_of(0) == [0] * slots
        assert tiers._residency.residents(0) == {}
        assert tiers.stats().l1.bytes_in == filled
        tiers.check_valid()
        with tiers.acquire(0, range(slots)) as lease:
            assert lease.held is not None
            for expert, slot in zip(*(part.tolist() for part in lease.held), strict=True):
                for matrix, span in zip(table.layers[0].matrices, table.span(0, expert), strict=True):
                    view = lease.view(matrix.role)
                    found = read(device, view.address + slot * view.stride_bytes, view.matrix_bytes)
                    assert found == source.expected(span)
        assert tiers.stats().file.reads == reads, "L2 has them still"
