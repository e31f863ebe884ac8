"""A model's layers on several devices: every expert in one place, budgets of the whole, and errors with a name."""

from __future__ import annotations

from contextlib import ExitStack
from copy import copy
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import expertier as et
from devices.two_device_tiers import check_both, check_slots
from expertier.errors import BudgetError, BusyError, SourceError
from expertier.hip.host import HostDevice
from expertier.planner.budget.allocate import floor_bytes, full_bytes
from expertier.planner.budget.ledger import DeviceNeeds
from expertier.testing.fake_device import FakeDevice
from expertier.testing.pattern_source import PatternSource
from expertier.testing.synthetic_table import LayerShape, synthetic_table
from expertier.tiers.config.budget import all_copies_bytes
from expertier.tiers.host_pool.budget import process_budget
from expertier.tiers.layer_division import DeviceShare, LayerDivision
from expertier.tiers.shared.stats import summed
from expertier.tiers.tier_set import TierSet
from expertier.units import MIB
from model_files.gguf_files import Block, ModelFile, write_model

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
    shares = [
        DeviceShare(one, tuple(range(cut)), needs.get("first")),
        DeviceShare(two, tuple(range(cut, LAYERS)), needs.get("second")),
    ]
    return TierSet(LayerDivision(model.table, shares), config=config)


def wrong_experts(model: ModelFile, tiers: TierSet) -> list:
    """Use every expert of every layer; return those whose bytes were not the file's."""
    wrong = []
    for layer in range(LAYERS):
        ((manager, own),) = tiers.places_of(layer)
        for expert in range(model.table.layers[layer].n_experts):
            with manager.acquire(own, [expert]) as lease:
                for group in lease.groups:
                    wrong += part_of(model, manager).wrong_bytes(lease, group)
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
    too_little = budget_of(model.table, 1) - 1
    with pytest.raises(BudgetError, match="MOE_EXPERT_CACHE_MIB"):
        open_set(model, 2, et.TierConfig(expert_cache_bytes=too_little))
    with pytest.raises(BudgetError, match="MOE_POOL_CAP_MIB"):
        open_set(model, 2, et.TierConfig(cap_bytes=too_little))


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
            ((manager, own),) = tiers.places_of(4)
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
    source = tiers.managers[0]._parts.source
    tiers.close()
    tiers.close()
    with pytest.raises(SourceError, match="closed"):
        source.read_into(model.table.span(0, 0)[0], memoryview(bytearray(model.table.span(0, 0)[0].n_bytes)))


@pytest.mark.parametrize("layers", [((0, 1), (2, 3)), ((0, 1, 2), (2, 3, 4)), ((0, 1, 2, 3, 4), ())])
def test_each_layer_is_in_one_share(model, layers):
    with pytest.raises(ValueError, match="shares"):
        LayerDivision(model.table, [DeviceShare(HostDevice(), share) for share in layers])


def test_a_prefetch_goes_to_the_layers_device(model):
    with open_set(model, 2, et.TierConfig(expert_cache_bytes=budget_of(model.table, 4))) as tiers:
        tiers.prefetch(3, [0, 1])
        tiers.drain()
        assert [manager.stats().prefetch.done for manager in tiers.managers] == [0, 2]
        with pytest.raises(IndexError, match="0 to 4"):
            tiers.prefetch(5, [0])


def test_both_devices_at_once() -> None:
    with HostDevice() as one, HostDevice() as two:
        check_both([one, two])


@st.composite
def split_models(draw: st.DrawFn) -> tuple[et.ExpertTable, list[tuple[int, ...]], int, int]:
    """A model, its layers cut into parts, a budget for slots and one for the host pools."""
    types = st.sampled_from([("Q4_0",) * 3, ("Q4_0", "Q4_0", "Q8_0"), ("Q8_0",) * 3])
    shapes = draw(
        st.lists(
            st.builds(LayerShape, st.integers(2, 9), st.just(64), st.just(32), types), min_size=2, max_size=7
        )
    )
    table = synthetic_table(shapes, top_k=2)
    ends = draw(st.sets(st.integers(1, len(shapes) - 1), min_size=1, max_size=3))
    bounds = [0, *sorted(ends), len(shapes)]
    parts = [tuple(range(begin, end)) for begin, end in pairwise(bounds)]
    demands = table.layer_demands()
    arena = draw(st.integers(floor_bytes(demands), full_bytes(demands) + 4096))
    return table, parts, arena, draw(st.integers(0, 2 * all_copies_bytes(table)))


@given(split_models(), st.data())
@settings(deadline=None)
def test_a_set_is_the_one_manager_in_pieces(made, data) -> None:
    """The same slots for each layer as on one device, within the same budgets, and the file's bytes in them."""
    table, parts, arena, pool = made
    config = et.TierConfig(expert_cache_bytes=arena, host_pool_bytes=pool, fill_threads=0)
    source = PatternSource(1)
    with ExitStack() as closing:
        devices = [closing.enter_context(HostDevice()) for _ in parts]
        placed = [DeviceShare(device, layers) for device, layers in zip(devices, parts, strict=True)]
        tiers = closing.enter_context(TierSet(LayerDivision(table, placed), config=config, source=source))
        plan = et.plan_layers(
            table.layer_demands(), budget_bytes=min(arena, full_bytes(table.layer_demands()))
        )
        assert tiers.slots == plan.slots
        assert sum(manager.stats().l2.budget_bytes for manager in tiers.managers) <= pool
        for _ in range(12):
            layer = data.draw(st.integers(0, table.n_layers - 1))
            expert = data.draw(st.integers(0, table.layers[layer].n_experts - 1))
            ((manager, own),) = tiers.places_of(layer)
            check_slots(
                manager, devices[tiers.managers.index(manager)], source, own, range(expert, expert + 1)
            )
            assert process_budget().used_bytes <= pool
        tiers.check_valid()
