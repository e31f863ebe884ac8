"""A device without streams that queues what a move of the slots needs: nobody uses the slots before it is done."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest

import expertier as et
from expertier.errors import DeviceError
from expertier.hip.device import Moves
from expertier.hip.host import HostDevice
from expertier.hip.zeros import Pieces, Relocator
from expertier.testing import LayerShape, PatternSource, synthetic_table
from expertier.tiers.manager import TierManager
from expertier.tiers.model.slot_layout import GUARD_BYTES

TABLE = synthetic_table([LayerShape(n_experts=8), LayerShape(types=("Q4_0", "Q4_0", "Q8_0"), n_experts=12)])
COMPUTE_BYTES = 40_000
SLOTS = 4


class QueueingDevice(HostDevice):
    """The host, where relocations are done by `finish`. The n-th of them fails, with half of its moves queued."""

    def __init__(self) -> None:
        super().__init__()
        self.queued: list[Callable[[], None]] = []
        self.fails_at: int | None = None
        self.n_relocations = 0

    def relocate(self, moves: Moves, zeros: Pieces, stream: int = 0) -> None:
        self.n_relocations += 1
        fails = self.n_relocations == self.fails_at
        done = moves[: len(moves) // 2] if fails else moves
        self.queued.append(partial(self.copy_within, done, stream))
        if fails:
            raise DeviceError("told to fail")
        self.queued += [partial(self.zero, at, n) for at, n in zeros.tolist()]

    def finish(self) -> None:
        queued, self.queued = self.queued, []
        for work in queued:
            work()


@pytest.fixture
def device() -> QueueingDevice:
    return QueueingDevice()


@pytest.fixture
def tiers(device: QueueingDevice) -> Iterator[TierManager]:
    budget = sum(demand.bytes_for(SLOTS) for demand in TABLE.layer_demands())
    config = et.TierConfig(expert_cache_bytes=budget, host_pool_bytes=1 << 20, fill_threads=0)
    manager = TierManager(
        TABLE, device=device, config=config, source=PatternSource(), compute_bytes=COMPUTE_BYTES
    )
    for layer in range(2):
        manager.acquire(layer, range(SLOTS)).release()
    manager.engine.bind()
    yield manager
    manager.engine.unbind()
    manager.close()
    device.close()


def assert_there(tiers: TierManager, device: QueueingDevice) -> None:
    """Assert that nothing is queued any more, that residents have their bytes, and that FREE slots begin with zeros."""
    assert not device.queued
    tiers.check_valid()
    source = PatternSource()
    for number, layer in enumerate(TABLE.layers):
        residents = tiers._residency.residents(number)
        for expert, slot in residents.items():
            for matrix, place in zip(layer.matrices, tiers._slab.places(number), strict=True):
                expected = bytearray(matrix.expert_bytes)
                source.read_into(matrix.span(expert), memoryview(expected))
                at = tiers._slab.base + place.offset + slot * place.stride
                assert ctypes.string_at(at, len(expected)) == expected, (number, expert, matrix.role)
        for slot in set(range(tiers.slots[number])) - set(residents.values()):
            for at, _, n_bytes in tiers._slab.fills(number, [slot], [0]).tolist():
                assert not any(ctypes.string_at(at, min(n_bytes, GUARD_BYTES))), (number, slot)


def test_a_move_waits_for_what_it_queued(tiers: TierManager, device: QueueingDevice) -> None:
    wide = tiers.engine.compute_bytes
    for n_bytes in (1000, wide, 20_000, 1000, tiers.engine.most_compute_bytes, 0):
        tiers.engine.move_boundary(n_bytes)
        assert_there(tiers, device)
    assert device.n_relocations == 6


def test_a_move_that_fails_waits_too(tiers: TierManager, device: QueueingDevice) -> None:
    before = tiers.slots
    device.fails_at = 1
    with pytest.raises(DeviceError, match="told to fail"):
        tiers.engine.move_boundary(1000)
    assert tiers.slots == before
    assert_there(tiers, device)
    tiers.engine.move_boundary(1000)
    assert_there(tiers, device)


def test_meanwhile_all_is_known_and_nothing_is_awaited(tiers: TierManager, device: QueueingDevice) -> None:
    seen: list[tuple[int, int]] = []

    def look() -> None:
        assert device.queued
        layout, residency = tiers.engine.layout(), tiers._residency
        assert layout.n_slots.tolist() == list(tiers.slots) == residency.n_slots.tolist()
        assert layout.directory_address == residency.directory_address
        assert tiers.engine.slots_are_sound
        residency.check_valid()
        assert tiers._usage._moving, "others may come in"
        seen.append((layout.directory_address, tiers.engine.compute_bytes))

    wide = tiers.engine.compute_bytes
    for n_bytes in (1000, wide, tiers.engine.most_compute_bytes, 0):
        before = len(seen)
        tiers.engine.move_boundary(n_bytes, meanwhile=look)
        assert len(seen) == before + 1
        assert seen[-1] == (tiers.engine.layout().directory_address, tiers.engine.compute_bytes)
        assert_there(tiers, device)
    tiers.engine.move_boundary(tiers.engine.compute_bytes, meanwhile=look)  # nothing moves
    assert len(seen) == 4


def test_what_fails_meanwhile_fails_a_move_that_is_made(tiers: TierManager, device: QueueingDevice) -> None:
    def fail() -> None:
        raise RuntimeError("told to fail")

    with pytest.raises(RuntimeError, match="told to fail"):
        tiers.engine.move_boundary(1000, meanwhile=fail)
    assert tiers.engine.compute_bytes < COMPUTE_BYTES
    assert_there(tiers, device)
    tiers.engine.move_boundary(COMPUTE_BYTES)
    assert_there(tiers, device)


def test_no_meanwhile_in_a_move_that_fails(tiers: TierManager, device: QueueingDevice) -> None:
    calls: list[None] = []
    device.fails_at = 1
    with pytest.raises(DeviceError, match="told to fail"):
        tiers.engine.move_boundary(1000, meanwhile=lambda: calls.append(None))
    assert not calls


def test_without_such_a_device_both_calls_are_made_at_once() -> None:
    calls: list[str] = []

    class Plain(HostDevice):
        def copy_within(self, moves: Moves, stream: int = 0) -> None:
            calls.append(f"copy {len(moves)} on {stream}")

        def zero_all(self, pieces: Pieces, stream: int = 0) -> None:
            calls.append(f"zero {pieces.tolist()} on {stream}")

    relocator = Relocator(Plain())
    relocator.relocate(np.empty((0, 3), np.int64), np.array([[64, 5], [96, 7]], np.int64), 3)
    relocator.relocate(np.array([[0, 1, 2]], np.int64), np.empty((0, 2), np.int64), 4)
    relocator.finish()
    assert calls == ["zero [[64, 5], [96, 7]] on 3", "copy 1 on 4", "zero [] on 4"]
