"""One source for the shards of several devices: every shard is the file's bytes, and every matrix is read once."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertier.errors import SourceError, UnsupportedLayoutError
from expertier.hip.faults.plan import FaultPlan
from expertier.tiers.file.faulty_source import FaultySource
from expertier.tiers.model.layer import ExpertLayer
from expertier.tiers.model.matrix import ExpertMatrix, Role
from expertier.tiers.model.span import Span
from expertier.tiers.model.table import ExpertTable
from expertier.tiers.split.split_source import SplitSource, waiting_limit
from expertier.tiers.split.split_table import ShardRef, SplitTable
from expertier.tiers.split.tensor_cut import TensorCut
from expertier.tiers.split.waiting_shards import WaitingShards
from limits.waits import PATIENCE_S, Running

N_DEVICES, N_EXPERTS, N_LAYERS = 3, 4, 2
ROWS = (3, 2, 1)  # of the gate, by device
COLUMNS = (1, 2, 3)  # of the down matrix, in blocks of 34 bytes


def table_of() -> ExpertTable:
    layers = []
    at = 1000
    for block in range(N_LAYERS):
        matrices = []
        for role, ne0, ne1 in ((Role.GATE, 64, 6), (Role.DOWN, 192, 2)):
            n_bytes = ne0 // 32 * 34 * ne1
            matrices.append(ExpertMatrix(role, f"blk.{block}.{role}", 8, 34, ne0, ne1, n_bytes, at))
            at += N_EXPERTS * n_bytes + 7
        layers.append(ExpertLayer(block, N_EXPERTS, tuple(matrices), 2))
    return ExpertTable((), "test", tuple(layers))


def split_of(table: ExpertTable) -> SplitTable:
    cuts = {}
    for layer in table.layers:
        gate, down = layer.matrices
        cuts[gate.name] = TensorCut.of_segments(1, [(1, ROWS)])
        cuts[down.name] = TensorCut.of_segments(0, [(1, [32 * n for n in COLUMNS])])
    return SplitTable.of(table, cuts, N_DEVICES)


def file_bytes(span: Span) -> np.ndarray:
    return ((np.arange(span.offset, span.end) * 2654435761) >> 7).astype(np.uint8)


@dataclass
class Pattern:
    """A source whose bytes follow from their place; counts reads of each span."""

    reads: list[Span]

    def read_into(self, span: Span, buffer: memoryview) -> None:
        self.reads.append(span)
        buffer[:] = file_bytes(span).tobytes()


TABLE = table_of()
SPLIT = split_of(TABLE)


def wanted(device: int, layer: int, matrix: int, expert: int) -> tuple[Span, np.ndarray]:
    """Where a shard is asked for, and its bytes."""
    full = TABLE.layers[layer].matrices[matrix]
    piece = SPLIT.shards[device][2 * layer + matrix]
    expected = np.empty(piece.matrix.expert_bytes, np.uint8)
    piece.gather(file_bytes(full.span(expert)), expected)
    return SPLIT.tables[device].layers[layer].matrices[matrix].span(expert), expected


def all_wanted(device: int) -> list[tuple[Span, np.ndarray]]:
    return [
        wanted(device, layer, matrix, expert)
        for layer in range(N_LAYERS)
        for matrix in range(2)
        for expert in range(N_EXPERTS)
    ]


def read(source: SplitSource, device: int, span: Span) -> np.ndarray:
    out = np.empty(span.n_bytes, np.uint8)
    source.of_device(device).read_into(span, out.data)
    return out


def test_shards_of_all_devices_are_the_full_matrix():
    assert sum(table.expert_bytes_total for table in SPLIT.tables) == TABLE.expert_bytes_total
    assert [table.layers[0].matrices[0].ne1 for table in SPLIT.tables] == list(ROWS)
    assert [table.layers[0].matrices[1].ne0 for table in SPLIT.tables] == [32 * n for n in COLUMNS]


@settings(deadline=None)
@given(st.data())
def test_every_matrix_is_read_once_in_any_order_of_the_devices(data):
    pattern = Pattern([])
    source = SplitSource(pattern, SPLIT, waiting_bytes=TABLE.expert_bytes_total)
    asked = [(device, *one) for device in range(N_DEVICES) for one in all_wanted(device)]
    for device, span, expected in data.draw(st.permutations(asked)):
        assert (read(source, device, span) == expected).all()
    assert len(pattern.reads) == len(set(pattern.reads)) == N_LAYERS * 2 * N_EXPERTS
    stats = source.stats()
    assert stats.file.bytes_read == TABLE.expert_bytes_total
    assert stats.handed_over == (N_DEVICES - 1) * len(pattern.reads)
    assert stats.waiting_bytes == stats.dropped == 0
    source.check_valid()


@settings(deadline=None)
@given(st.integers(0, TABLE.expert_bytes_total), st.data())
def test_waiting_shards_stay_within_their_limit(limit, data):
    source = SplitSource(Pattern([]), SPLIT, waiting_bytes=limit)
    asked = [(device, *one) for device in range(N_DEVICES) for one in all_wanted(device)]
    for device, span, expected in data.draw(st.lists(st.sampled_from(asked), max_size=60)):
        assert (read(source, device, span) == expected).all()
        source.check_valid()
    assert source.stats().waiting_peak_bytes <= limit


def test_devices_that_ask_at_the_same_time_share_a_read():
    for seed in range(10):
        pattern = Pattern([])
        source = SplitSource(pattern, SPLIT, waiting_bytes=TABLE.expert_bytes_total)

        def ask(device: int, seed: int = seed, source: SplitSource = source) -> None:
            asked = all_wanted(device)
            random.Random(seed + device).shuffle(asked)
            for span, expected in asked:
                assert (read(source, device, span) == expected).all()

        with ThreadPoolExecutor(N_DEVICES) as threads:
            list(threads.map(ask, range(N_DEVICES), timeout=PATIENCE_S))
        assert sorted(pattern.reads) == sorted(set(pattern.reads))
        source.check_valid()


class HeldPattern(Pattern):
    """Its reads go on once they may."""

    def __init__(self) -> None:
        super().__init__([])
        self.began, self.may_end = threading.Event(), threading.Event()

    def read_into(self, span: Span, buffer: memoryview) -> None:
        self.began.set()
        assert self.may_end.wait(30)
        super().read_into(span, buffer)


def test_a_device_waits_for_the_read_of_another_that_has_its_shard_too():
    pattern = HeldPattern()
    source = SplitSource(pattern, SPLIT, waiting_bytes=TABLE.expert_bytes_total)
    asked = [wanted(device, 0, 0, 0) for device in range(2)]
    first = Running(read, source, 0, asked[0][0])
    assert pattern.began.wait(30)
    second = Running(read, source, 1, asked[1][0])
    second.must_wait_in("wait_interruptibly")
    pattern.may_end.set()
    for found, (_, expected) in zip((first, second), asked, strict=True):
        assert (found.outcome() == expected).all()
    assert len(pattern.reads) == 1


@pytest.mark.parametrize("nth", range(1, 2 * N_LAYERS * N_EXPERTS + 1))
def test_a_read_that_fails_is_tried_again_by_whoever_asks_next(nth):
    plan = FaultPlan()
    pattern = Pattern([])
    source = SplitSource(FaultySource(pattern, plan), SPLIT)
    plan.arm("read", nth)
    failures = 0
    for number in range(2 * N_LAYERS * N_EXPERTS):
        for device in range(N_DEVICES):
            span, expected = all_wanted(device)[number]
            try:
                found = read(source, device, span)
            except SourceError:
                failures += 1
                source.check_valid()
                found = read(source, (device + 1) % 2, all_wanted((device + 1) % 2)[number][0])
                found = read(source, device, span)
            assert (found == expected).all()
    assert failures == 1
    assert source.stats().file.failures == 1


def test_spans_that_are_not_one_shard_are_refused():
    span, _ = wanted(1, 0, 1, 2)
    source = SplitSource(Pattern([]), SPLIT)
    for wrong in (Span(span.offset + 1, span.n_bytes), Span(span.offset, span.n_bytes - 1)):
        with pytest.raises(ValueError, match=r"a shard is read as a whole"):
            read(source, 1, wrong)
    with pytest.raises(ValueError, match="must be equal"):
        source.of_device(1).read_into(span, memoryview(bytearray(3)))


def test_hints_name_full_matrices_whose_shards_do_not_wait():
    hinted: list[Span] = []

    class Hinted(Pattern):
        def will_need(self, spans):
            hinted.extend(spans)

    source = SplitSource(Hinted([]), SPLIT)
    first, second = wanted(0, 0, 0, 0)[0], wanted(0, 0, 0, 1)[0]
    read(source, 1, wanted(1, 0, 0, 0)[0])
    source.of_device(0).will_need([first, second])
    assert hinted == [TABLE.layers[0].matrices[0].span(1)]


def test_a_tensor_whose_split_is_not_known_is_refused():
    with pytest.raises(UnsupportedLayoutError, match=r"blk\.0\.gate: it is not known how the engine splits"):
        SplitTable.of(TABLE, {}, 2)


def test_the_limit_holds_a_small_model_and_not_a_large_one():
    assert waiting_limit(SPLIT) == TABLE.expert_bytes_total
    large = tuple(
        replace(layer, n_experts=1 << 20) for layer in TABLE.layers
    )  # of which two steps still take less
    limit = waiting_limit(replace(SPLIT, full_table=replace(TABLE, layers=large)))
    assert limit < large[0].n_experts * large[0].expert_bytes
    assert limit >= 2 * TABLE.top_k * large[0].expert_bytes


def test_a_shard_above_the_limit_does_not_wait_and_the_oldest_is_dropped_first():
    waiting = WaitingShards(10)
    for number, n_bytes in enumerate((4, 4, 4, 11)):
        waiting.put((ShardRef(0, number), 0), np.zeros(n_bytes, np.uint8))
        waiting.check_valid()
    assert [(ShardRef(0, number), 0) in waiting for number in range(4)] == [False, True, True, False]
    assert waiting.dropped == 2
    assert waiting.take((ShardRef(0, 1), 0)) is not None
    assert waiting.take((ShardRef(0, 1), 0)) is None
    assert waiting.n_bytes == 4
