"""Tiers of shards on two devices: what leases show is the file's bytes, budgets are those of all devices together."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest

from engine_runs.tiered_runs import write_small_model
from expertier.errors import BudgetError, SourceError
from expertier.hip import open_device
from expertier.hip.faults.plan import FaultPlan
from expertier.tiers.config.config import TierConfig
from expertier.tiers.file.faulty_source import FaultySource
from expertier.tiers.file.source import FileSource
from expertier.tiers.manager import TierManager
from expertier.tiers.model.table import ExpertTable
from expertier.tiers.shard_division import ShardDivision
from expertier.tiers.split.split_table import SplitTable
from expertier.tiers.split.tensor_cut import TensorCut
from expertier.tiers.tier_set import TierSet

ROWS = (160, 96)  # of gate and up, and columns of down: blocks of 32


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> SplitTable:
    table = ExpertTable.from_gguf(write_small_model(tmp_path_factory.mktemp("shards"), "Q8_0"))
    cuts = {
        matrix.name: TensorCut.of_segments(0 if "down" in matrix.name else 1, [(1, ROWS)])
        for layer in table.layers
        for matrix in layer.matrices
    }
    return SplitTable.of(table, cuts, 2)


def slots_config(split: SplitTable, n_slots: int, **more: object) -> TierConfig:
    demands = [demand for table in split.tables for demand in table.layer_demands()]
    return TierConfig(expert_cache_bytes=sum(demand.bytes_for(n_slots) for demand in demands), **more)


def open_set(split: SplitTable, config: TierConfig, **more: object) -> TierSet:
    return TierSet(ShardDivision(split, [open_device("host"), open_device("host")]), config=config, **more)


def file_shard(path: Path, split: SplitTable, device: int, layer: int, expert: int, number: int) -> bytes:
    """A shard of an expert's matrix, gathered from the file here."""
    full = split.full_table.layers[layer].matrices[number]
    with path.open("rb") as file:
        file.seek(full.span(expert).offset)
        rows = np.frombuffer(file.read(full.expert_bytes), np.uint8).reshape(full.ne1, -1)
    begin = 0 if device == 0 else ROWS[0]
    if "down" in full.name:
        block = slice(begin // 32 * 34, (begin + ROWS[device]) // 32 * 34)
        return rows[:, block].tobytes()
    return rows[begin : begin + ROWS[device]].tobytes()


def assert_bytes(split: SplitTable, tiers: TierSet, layer: int, experts: list[int]) -> None:
    for device, manager in enumerate(tiers.managers):
        with manager.acquire(layer, experts) as lease:
            for group in lease.groups:
                for number, matrix in enumerate(manager.table.layers[layer].matrices):
                    view = lease.view(matrix.role)
                    for expert, slot in zip(group.experts.tolist(), group.slots.tolist(), strict=True):
                        found = ctypes.string_at(view.address + slot * view.stride_bytes, matrix.expert_bytes)
                        assert found == file_shard(
                            split.full_table.path, split, device, layer, expert, number
                        )


def assert_all_bytes(split: SplitTable, tiers: TierSet, layer: int) -> None:
    for first in range(0, 16, 4):
        assert_bytes(split, tiers, layer, list(range(first, first + 4)))


@pytest.mark.parametrize("host_pool_bytes", [0, 1 << 30])
def test_leases_show_the_shards_of_the_file_and_each_expert_is_read_once(split, host_pool_bytes):
    with open_set(split, slots_config(split, 4, host_pool_bytes=host_pool_bytes)) as tiers:
        assert tiers.slots == (4, 4, 4)
        for layer in range(3):
            assert_all_bytes(split, tiers, layer)
        assert tiers.split_source.stats().file.bytes_read == split.full_table.expert_bytes_total
        tiers.check_valid()
        if host_pool_bytes:
            assert_bytes(split, tiers, 0, [0, 5, 10, 15])
            assert tiers.split_source.stats().file.bytes_read == split.full_table.expert_bytes_total


def test_a_number_of_bytes_gives_every_device_the_same_slots_within_it(split):
    config = slots_config(split, 7)
    assert isinstance(config.expert_cache_bytes, int)
    with open_set(split, config) as tiers:
        assert [manager.slots for manager in tiers.managers] == [(7, 7, 7), (7, 7, 7)]
        assert tiers.arena_bytes <= config.expert_cache_bytes
        first, second = (manager.arena_bytes for manager in tiers.managers)
        assert first > second
    with open_set(split, TierConfig(expert_cache_bytes=config.expert_cache_bytes - 1)) as tiers:
        assert sum(tiers.slots) < 21


def test_the_host_pools_share_their_bytes(split):
    config = slots_config(split, 4, host_pool_bytes=4 << 20)
    with open_set(split, config) as tiers:
        pools = [manager.stats().l2.budget_bytes for manager in tiers.managers]
        assert sum(pools) <= 4 << 20
        assert pools[0] > pools[1] > 0


def test_a_budget_below_a_slot_of_every_layer_is_refused_before_anything_is_allocated(split):
    devices = [open_device("host"), open_device("host")]
    config = TierConfig(expert_cache_bytes=slots_config(split, 1).expert_cache_bytes - 1)
    with pytest.raises(
        BudgetError, match=r"one slot in each of 3 layers takes .* on 2 devices together: set MOE_EXP"
    ):
        TierSet(ShardDivision(split, devices), config=config)
    assert [device.device_bytes for device in devices] == [0, 0]


def test_a_device_without_room_is_named_and_nothing_stays_allocated(split, monkeypatch):
    devices = [open_device("host"), open_device("host")]
    real = TierManager.__init__

    def second_fails(self, *arguments, **named):
        if named["device"] is devices[1]:
            raise BudgetError("no room for one slot in each layer")
        real(self, *arguments, **named)

    monkeypatch.setattr(TierManager, "__init__", second_fails)
    with pytest.raises(BudgetError, match="host, which has shards of all 3 layers: no room"):
        TierSet(ShardDivision(split, devices), config=slots_config(split, 4))
    assert [device.device_bytes for device in devices] == [0, 0]


@pytest.mark.parametrize("nth", [1, 2, 5, 11])
def test_a_failed_read_fails_one_device_and_the_next_call_works(split, nth):
    plan = FaultPlan()
    with (
        FileSourceOf(split) as file,
        open_set(split, slots_config(split, 4), source=FaultySource(file, plan)) as tiers,
    ):
        plan.arm("read", nth)
        with pytest.raises(SourceError):
            assert_all_bytes(split, tiers, 1)
        tiers.check_valid()
        assert_all_bytes(split, tiers, 1)
        tiers.check_valid()


def test_prefetches_bring_all_slices(split):
    with open_set(split, slots_config(split, 4, fill_threads=0)) as tiers:
        tiers.prefetch(2, [3, 9])
        tiers.drain()
        before = tiers.split_source.stats().file.bytes_read
        assert_bytes(split, tiers, 2, [3, 9])
        assert tiers.split_source.stats().file.bytes_read == before > 0
        assert all(manager.stats().l1.misses == 0 for manager in tiers.managers)


class FileSourceOf(FileSource):
    """The model's file, closed at the end of a block."""

    def __init__(self, split: SplitTable) -> None:
        super().__init__(split.full_table.files)

    def __enter__(self) -> FileSourceOf:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
