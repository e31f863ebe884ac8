"""A model's layers on several devices: every expert in one place, budgets of the whole, and errors with a name."""

from __future__ import annotations

from copy import copy

import pytest

import expertier as et
from expertier.errors import BudgetError, BusyError, SourceError
from expertier.hip.host import HostDevice
from expertier.planner.ledger import DeviceNeeds
from expertier.testing.fake_device import FakeDevice
from expertier.tiers.budget import all_copies_bytes
from expertier.tiers.host_budget import process_budget
from expertier.tiers.stats import summed
from expertier.tiers.tier_set import DevicePart, TierSet, managers
from expertier.units import MIB
from gguf_files import Block, ModelFile, write_model

LAYERS = 5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFile:
    blocks = [Block(n_experts=8 + i, types=("Q4_0", "Q4_0", ("Q4_0", "Q8_0")[i % 2])) for i in range(LAYERS)]
    return write_model(tmp_path_factory.mktemp("set") / "model.gguf", blocks)


def budget_of(table: et.ExpertTable, n_slots: int) -> int:
    return sum(demand.bytes_for(n_slots) for demand in table.layer_demands())


def open_set(
    model: ModelFile, cut: int, config: et.TierConfig, devices: tuple = (), **needs: object
) -> TierSet:
    one, two = devices or (HostDevice(), HostDevice())
    parts = [
        DevicePart(one, tuple(range(cut)), needs.get("first")),
        DevicePart(two, tuple(range(cut, LAYERS)), needs.get("second")),
    ]
    return TierSet(model.table, parts, config=config)


def wrong_experts(model: ModelFile, tiers: TierSet) -> list:
    """Use every expert of every layer; return those whose bytes were not the file's."""
    wrong = []
    for layer in range(LAYERS):
        manager, own = tiers.place_of(layer)
        for expert in range(model.table.layers[layer].n_experts):
            with manager.acquire(own, [expert]) as lease:
                for part in lease.parts:
                    wrong += part_of(model, manager).wrong_bytes(lease, part)
    return wrong


def part_of(model: ModelFile, manager: et.TierManager) -> ModelFile:
    """The file, as a manager counts its layers."""
    part = copy(model)
    part.table = manager.table
    return part


@pytest.mark.parametrize("cut", range(1, LAYERS))
@pytest.mark.parametrize("n_slots", [1, 3, 8])
def test_every_layer_has_the_slots_of_one_plan(model, cut, n_slots):
    config = et.TierConfig(expert_cache_bytes=budget_of(model.table, n_slots))
    with open_set(model, cut, config) as tiers:
        assert (
            tiers.slots
            == et.plan_layers(model.table.layer_demands(), budget_bytes=config.expert_cache_bytes).slots
        )
        assert tiers.arena_bytes <= config.expert_cache_bytes
        assert wrong_experts(model, tiers) == []
        tiers.check_valid()


def test_each_expert_is_read_once_and_counted_in_the_sums(model):
    config = et.TierConfig(
        expert_cache_bytes=budget_of(model.table, 2), host_pool_bytes=2 * all_copies_bytes(model.table)
    )
    with open_set(model, 2, config) as tiers:
        for _ in range(2):
            assert wrong_experts(model, tiers) == []
        stats = tiers.stats()
        assert stats == summed([manager.stats() for manager in tiers.managers])
        assert stats.file.bytes_read == model.table.expert_bytes_total
        n_experts = sum(layer.n_experts for layer in model.table.layers)
        assert stats.l1.misses == stats.l2.hits + stats.l2.misses == 2 * n_experts
        assert all(manager.stats().file.bytes_read for manager in tiers.managers)
        assert managers(tiers) == tiers.managers


@pytest.mark.parametrize("share", [0.1, 0.5, 1, 3])
def test_the_pools_share_one_budget_by_their_experts(model, share):
    pool = int(all_copies_bytes(model.table) * share)
    config = et.TierConfig(expert_cache_bytes=budget_of(model.table, 1), host_pool_bytes=pool)
    with open_set(model, 1, config) as tiers:
        parts = [manager.stats().l2.budget_bytes for manager in tiers.managers]
        copies = [all_copies_bytes(manager.table) for manager in tiers.managers]
        assert pool - len(parts) < sum(parts) <= pool
        assert parts[0] * copies[1] == pytest.approx(parts[1] * copies[0], rel=0.01)
        limit = process_budget().limit_bytes
        assert min(pool, sum(copies)) - len(parts) <= limit <= pool
        wrong_experts(model, tiers)
        assert process_budget().used_bytes <= pool
        if share >= 1:
            wrong_experts(model, tiers)
            assert tiers.stats().file.bytes_read == model.table.expert_bytes_total, "all of them were kept"


def test_a_budget_below_the_floor_names_the_variable(model):
    config = et.TierConfig(expert_cache_bytes=budget_of(model.table, 1) - 1)
    with pytest.raises(BudgetError, match="MOE_EXPERT_CACHE_MIB"):
        open_set(model, 2, config)


def test_a_device_without_room_for_the_floor_is_named_with_the_numbers(model):
    with FakeDevice(capacity_bytes=64 * MIB) as one, FakeDevice(capacity_bytes=64 * MIB) as two:
        taken = DeviceNeeds(0, weights=64 * MIB)
        with pytest.raises(BudgetError, match=r"2 of 5 layers with experts: .*64\.0 MiB.*at least"):
            open_set(model, 3, et.TierConfig(headroom_bytes=0), (one, two), second=taken)
        with open_set(model, 3, et.TierConfig(headroom_bytes=0), (one, two)) as tiers:
            assert tiers.slots == tuple(layer.n_experts for layer in model.table.layers)


def test_nothing_stays_after_an_error_or_the_end(model):
    before = process_budget().bounce_bytes
    with HostDevice() as one, HostDevice() as two:
        with open_set(
            model, 2, et.TierConfig(expert_cache_bytes=budget_of(model.table, 2)), (one, two)
        ) as tiers:
            assert one.device_bytes
            assert two.device_bytes
            manager, own = tiers.place_of(4)
            lease = manager.acquire(own, [0])
            with pytest.raises(BusyError):
                tiers.require_no_leases_here("run the engine")
            with pytest.raises(BusyError):
                tiers.close()
            lease.release()
        assert (one.device_bytes, two.device_bytes) == (0, 0)
        bad = et.TierConfig(expert_cache_bytes=budget_of(model.table, 2), profile=model.table.path)
        with pytest.raises(et.ConfigError):
            open_set(model, 2, bad, (one, two))
        assert (one.device_bytes, two.device_bytes) == (0, 0)
    assert process_budget().bounce_bytes == before


def test_a_closed_set_reads_nothing_more(model):
    tiers = open_set(model, 2, et.TierConfig(expert_cache_bytes=budget_of(model.table, 2)))
    source = tiers.managers[0]._source
    tiers.close()
    tiers.close()
    with pytest.raises(SourceError, match="closed"):
        source.read_into(model.table.span(0, 0)[0], memoryview(bytearray(model.table.span(0, 0)[0].n_bytes)))


@pytest.mark.parametrize("layers", [((0, 1), (2, 3)), ((0, 1, 2), (2, 3, 4)), ((0, 1, 2, 3, 4), ())])
def test_layers_are_all_in_one_part(model, layers):
    with pytest.raises(ValueError, match="parts"):
        TierSet(model.table, [DevicePart(HostDevice(), part) for part in layers])


def test_a_prefetch_goes_to_the_layers_device(model):
    with open_set(model, 2, et.TierConfig(expert_cache_bytes=budget_of(model.table, 4))) as tiers:
        tiers.prefetch(3, [0, 1])
        tiers.drain()
        assert [manager.stats().prefetch.done for manager in tiers.managers] == [0, 2]
        with pytest.raises(IndexError, match="0 to 4"):
            tiers.prefetch(5, [0])
