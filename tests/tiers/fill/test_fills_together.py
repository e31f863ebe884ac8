"""Experts that L2 has come into their slots together: one call, one fence, all or nothing, and right bytes."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import expertier as et
from expertier.errors import DeviceError
from expertier.hip.device import Moves
from expertier.hip.faults.device import FaultyDevice
from expertier.hip.faults.plan import FaultPlan
from expertier.hip.host import HostDevice
from expertier.testing import FakeDevice, LayerShape, PatternSource, synthetic_table
from expertier.tiers.fill import filler
from model_files.gguf_files import Block, BytesSource, ModelFile, write_model

SLOTS, EXPERTS = 6, 18
ONE_PIECE, ARRAYS = ("Q4_0", "Q4_0", "Q4_0"), ("Q4_0", "Q4_0", "Q8_0")


class BatchDevice(FakeDevice):
    """A fake device that takes copies in batches, and counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[int] = []
        self.singles = 0
        self.records = 0

    def copy_in_many(self, moves: Moves, stream: int = 0) -> None:
        self.batches.append(len(moves))
        for target, source, n_bytes in moves.tolist():
            super().copy_in(target, source, n_bytes, stream)

    def prepare_copies(self) -> None:
        """Have nothing to prepare."""

    def copy_in(self, target: int, source: int, n_bytes: int, stream: int = 0) -> None:
        self.singles += 1
        super().copy_in(target, source, n_bytes, stream)

    def record_event(self, event: int, stream: int) -> None:
        self.records += 1
        super().record_event(event, stream)


class Bench:
    """Tiers of one layer whose L2 has all experts, and none of them is in L1 but the last `SLOTS`."""

    def __init__(self, types: tuple[str, str, str], faults: FaultPlan | None = None) -> None:
        self.device = BatchDevice()
        self.table = synthetic_table([LayerShape(EXPERTS, types=types)])
        self.source = PatternSource(1)
        self.pieces = 1 if self.table.slot_layouts[0].stride else 3
        config = et.TierConfig(
            expert_cache_bytes=sum(demand.bytes_for(SLOTS) for demand in self.table.layer_demands()),
            host_pool_bytes=2 * EXPERTS * 16384,
            fill_threads=0,
        )
        device = self.device if faults is None else FaultyDevice(self.device, faults)
        self.tiers = et.TierManager(self.table, device=device, config=config, source=self.source)
        for first in range(0, EXPERTS, SLOTS):
            self.tiers.acquire(0, range(first, first + SLOTS)).release()
        self.device.batches.clear()
        self.device.singles = self.device.records = 0

    def wrong(self, lease: et.Lease) -> list[int]:
        """Return the experts whose bytes are not the file's."""
        self.device.synchronize()
        assert lease.held is not None
        found = []
        for expert, slot in zip(*(part.tolist() for part in lease.held), strict=True):
            for matrix, span in zip(self.table.layers[0].matrices, self.table.span(0, expert), strict=True):
                view = lease.view(matrix.role)
                at = view.address + slot * view.stride_bytes
                if self.device.read(at, view.matrix_bytes) != self.source.expected(span):
                    found.append(expert)
        return found

    def idle(self) -> bool:
        """Whether nobody uses a block of L2."""
        chunks = [c for size in self.tiers._pool._store.classes.values() for c in size.chunks.values()]
        return not any(chunk.n_in_use for chunk in chunks)

    def close(self) -> None:
        self.tiers.check_valid()
        self.tiers.close()
        self.device.close()


@pytest.fixture(params=[ONE_PIECE, ARRAYS], ids=["one piece", "arrays"])
def types(request: pytest.FixtureRequest) -> tuple[str, str, str]:
    chosen: tuple[str, str, str] = request.param
    return chosen


@pytest.fixture
def bench(types: tuple[str, str, str]) -> Iterator[Bench]:
    bench = Bench(types)
    yield bench
    bench.close()


@pytest.mark.parametrize("stream", [None, 0], ids=["waits", "queues"])
def test_a_batch_is_one_call_with_one_fence(bench: Bench, stream: int | None) -> None:
    reads = bench.tiers.stats().file.reads
    with bench.tiers.acquire(0, range(SLOTS), stream=stream) as lease:
        assert bench.device.batches == [SLOTS * bench.pieces]
        assert (bench.device.records, bench.device.singles) == (1, 0)
        assert bench.wrong(lease) == []
    assert bench.tiers.stats().file.reads == reads
    assert bench.idle()


def test_what_l2_lacks_is_read_beside_the_batch(bench: Bench) -> None:
    pool = bench.tiers._pool
    pool.resize(0)
    pool.resize(2 * EXPERTS * 16384)
    bench.tiers.acquire(0, [0, 1]).release()  # the only copies
    bench.tiers.acquire(0, range(6, 6 + SLOTS)).release()
    pool.touch([])
    kept = {expert for (_, expert), _ in pool.copies()}
    wanted = [0, 13, 1, 14]
    assert kept & set(wanted) == {0, 1}
    bench.device.batches.clear()
    with bench.tiers.acquire(0, wanted) as lease:
        assert bench.wrong(lease) == []
    assert bench.device.batches == [2 * bench.pieces, bench.pieces, bench.pieces]


def test_a_copy_that_leaves_l2_before_it_is_acquired_is_read(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = bench.tiers._pool
    contains = pool.contains

    def and_gone(key: tuple[int, int]) -> bool:
        there = contains(key)
        if key == (0, 2):  # the last that is asked for: all have been seen
            pool.resize(0)
            pool.resize(2 * EXPERTS * 16384)
        return there

    monkeypatch.setattr(pool, "contains", and_gone)
    reads = bench.tiers.stats().file.reads
    with bench.tiers.acquire(0, [0, 1, 2]) as lease:
        assert bench.wrong(lease) == []
    assert bench.tiers.stats().file.reads == reads + 9


def test_queued_copies_keep_their_blocks(bench: Bench) -> None:
    """L2 shrinks to nothing while a batch is queued: blocks that it reads stay until it has run."""
    pool, n_bytes = bench.tiers._pool, 2 * EXPERTS * 16384
    demand = bench.tiers._parts.filler._transfer.demand_stream
    with bench.tiers.acquire(0, range(SLOTS), stream=0) as lease:
        assert bench.device.queued(demand) > SLOTS
        bench.tiers.resize_host_pool(0)
        bench.tiers.resize_host_pool(n_bytes)
        assert {expert for (_, expert), _ in pool.copies()} >= set(range(SLOTS))
        assert bench.wrong(lease) == []
    bench.tiers.resize_host_pool(0)
    assert pool.copies() == []


@pytest.mark.parametrize("reader", range(SLOTS))
def test_a_batch_waits_for_the_reader_of_any_of_its_slots(bench: Bench, reader: int) -> None:
    bench.tiers.acquire(0, range(SLOTS)).release()
    lease = bench.tiers.acquire(0, [reader], stream=0)
    seen: list[bool] = []
    bench.device.launch(lambda: seen.append(True), 0)
    lease.release()
    demand = bench.tiers._parts.filler._transfer.demand_stream
    other = bench.device.create_stream()
    with bench.tiers.acquire(0, range(SLOTS, 2 * SLOTS), stream=other) as next_lease:
        bench.device.advance(demand, 1000)
        assert not seen, "the stream of the reader has not moved"
        assert bench.device.queued(demand) > SLOTS * bench.pieces, "the fills wait for the reader"
        assert bench.wrong(next_lease) == []
    bench.device.synchronize()
    bench.device.destroy_stream(other)


def test_whoever_reads_one_expert_of_a_batch_waits_for_it(bench: Bench) -> None:
    with bench.tiers.acquire(0, range(SLOTS), stream=0):
        for expert in range(SLOTS):
            stream = bench.device.create_stream()
            with bench.tiers.acquire(0, [expert], stream=stream):
                assert bench.device.advance(stream, 1000) == 0
                assert bench.device.queued(stream) == 1, "a wait for the batch"
        bench.device.synchronize()
    for stream in bench.device.streams[3:]:
        bench.device.destroy_stream(stream)


@pytest.mark.parametrize("error", [None, KeyboardInterrupt], ids=["own", "interrupt"])
@pytest.mark.parametrize("operation", ["copy_in", "record_event", "create_event"])
@pytest.mark.parametrize("nth", [1, 2, SLOTS, 3 * SLOTS])
def test_a_batch_that_fails_leaves_nothing(
    types: tuple[str, str, str], operation: str, nth: int, error: type[BaseException] | None
) -> None:
    faults = FaultPlan()
    bench = Bench(types, faults)
    before = bench.tiers.stats()
    expected = error or DeviceError
    faults.arm(operation, nth, error)
    try:
        lease = bench.tiers.acquire(0, range(SLOTS), stream=0)
    except expected as caught:
        traceback.clear_frames(caught.__traceback__)
        assert faults.injected[operation] == 1
        assert not any(bench.device.queued(stream) for stream in bench.device.streams), "still queued"
        assert bench.tiers._residency.pins_of(0) == [0] * SLOTS
        assert bench.tiers._residency.residents(0) == {}, "half present"
        assert bench.tiers.stats().l1.bytes_in == before.l1.bytes_in
    else:
        faults.disarm()
        assert operation != "copy_in" or nth > SLOTS * bench.pieces, "a failed copy went unnoticed"
        lease.release()
    faults.disarm()
    assert bench.idle()
    bench.tiers.check_valid()
    with bench.tiers.acquire(0, range(SLOTS), stream=0) as lease:
        assert bench.wrong(lease) == []
    bench.close()


def test_host_memory_is_copied_by_several_threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Batches of `BATCH_BYTES` each, all at once: the threads meet at a barrier."""
    model: ModelFile = write_model(tmp_path / "m.gguf", [Block(n_experts=EXPERTS)])
    monkeypatch.setattr(filler, "BATCH_BYTES", 2 * model.table.layers[0].expert_bytes)
    meeting = threading.Barrier(3, timeout=30)
    sizes: list[int] = []

    class Meeting(HostDevice):
        waits = False

        def copy_in_many(self, moves: Moves, stream: int = 0) -> None:
            if self.waits:
                sizes.append(len(moves))
                meeting.wait(30)
            super().copy_in_many(moves, stream)

    config = et.TierConfig(
        expert_cache_bytes=sum(demand.bytes_for(SLOTS) for demand in model.table.layer_demands()),
        host_pool_bytes=1 << 22,
        fill_threads=2,
    )
    with (
        Meeting() as device,
        et.TierManager(model.table, device=device, config=config, source=BytesSource(model.bytes)) as tiers,
    ):
        for first in range(0, EXPERTS, SLOTS):
            tiers.acquire(0, range(first, first + SLOTS)).release()
        device.waits = True
        with tiers.acquire(0, np.arange(SLOTS, dtype=np.int32)) as lease:
            assert lease.held is not None
            assert model.wrong_bytes(lease, lease.held) == []
        assert sizes == [2, 2, 2]
        tiers.check_valid()


@pytest.mark.parametrize("kind", ["present", "missing"])
def test_streamed_layers_are_loaded_together(bench: Bench, kind: str) -> None:
    if kind == "missing":
        bench.tiers.resize_host_pool(0)
    layout = bench.table.slot_layouts[0]
    address = bench.device.alloc(layout.range_bytes(EXPERTS))
    bench.tiers.engine.bind()
    experts = [3, 0, 17, 5]
    bench.tiers.engine.load(0, experts, address)
    bench.tiers.engine.unbind()
    if kind == "present":
        assert bench.device.batches == [len(experts) * bench.pieces]
    for expert in experts:
        for place, matrix, span in zip(
            layout.place(EXPERTS), bench.table.layers[0].matrices, bench.table.span(0, expert), strict=True
        ):
            found = bench.device.read(address + place.offset + expert * place.stride, matrix.expert_bytes)
            assert found == bench.source.expected(span)
    assert bench.idle()
    bench.device.free(address)
