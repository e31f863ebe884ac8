"""Budgets: what was asked for is what is used, and every byte is counted.

Each test bears the number of its row in docs/field-failures.md.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

import expertier as et
from engine_runs.field_tools import PROMPT, WatchedDevice, config_for, stock, tiers_on, wrong_after
from engine_runs.tiered_runs import SMALL, make_tiers, run_model
from expertier.errors import BudgetError, DeviceError
from expertier.hip.faults.device import FaultyDevice
from expertier.hip.faults.plan import FaultPlan
from expertier.hip.host import HostDevice
from expertier.planner.budget.allocate import LayerPlan, full_bytes, plan_layers
from expertier.planner.budget.demand import LayerDemand
from expertier.tiers.config.budget import resolve
from expertier.units import MIB


def test_row_03_admitted_or_an_error_with_numbers(engine, path):
    """At the smallest budget every layer is served by the tiers; a byte below it there are none at all."""
    table = et.ExpertTable.from_gguf(path)
    smallest = config_for(table, 1)
    with HostDevice() as device:
        too_small = replace(smallest, expert_cache_bytes=smallest.expert_cache_bytes - 1)
        with pytest.raises(BudgetError, match=r"one slot in each of 3 layers takes [0-9.]+ MiB.*at least \d"):
            et.TierManager(table, device=device, config=too_small)
        assert device.device_bytes == device.pinned_bytes == 0
        with et.TierManager(table, device=device, config=smallest) as tiers:
            run = run_model(engine, path, tiers, prompt=PROMPT, n_tokens=3)
            assert tiers.slots == (1,) * SMALL.layers
            assert min(tiers._residency.fills_by_layer()) > 0
    assert run.counters.id_reads == SMALL.layers * run.counters.graphs
    assert run.load.expert_bytes == 0


def test_row_09_little_is_lost_to_rounding(path):
    """Less than a slot of any budget is left over, padding is below 1 %, and the numbers say how much."""
    table = et.ExpertTable.from_gguf(path)
    demands, layouts = table.layer_demands(), table.slot_layouts
    for layer, demand, layout in zip(table.layers, demands, layouts, strict=True):
        assert demand.slot_bytes == layout.slot_bytes <= 1.01 * layer.expert_bytes
    smallest = sum(demand.bytes_for(1) for demand in demands)
    for budget in range(smallest, full_bytes(demands), 100_003):
        with (
            HostDevice() as device,
            et.TierManager(
                table, device=device, config=et.TierConfig(expert_cache_bytes=budget, host_pool_bytes=0)
            ) as tiers,
        ):
            l1 = tiers.stats().l1
            assert l1.budget_bytes == budget
            assert (
                0
                <= budget - l1.used_bytes
                < max(demand.slot_bytes for demand in demands) + 1024 * len(demands)
            )
            assert device.device_bytes < budget + 2 * 4096

    large = [LayerDemand(layer, 128, 8, 3_059_712, 640) for layer in range(48)]
    plan = plan_layers(large, budget_bytes=8192 * MIB)
    assert plan.budget_bytes - plan.used_bytes <= 0.01 * plan.budget_bytes


def test_row_12_no_flat_reserve_makes_a_small_machine_go_without(path):
    table = et.ExpertTable.from_gguf(path)
    smallest = sum(demand.bytes_for(1) for demand in table.layer_demands())
    given = []
    for available in (2 * smallest, 3 * smallest, 64 * MIB, 1 << 40):
        budgets = resolve(et.TierConfig(), table, available)
        assert smallest <= budgets.expert_cache_bytes + budgets.host_pool_bytes <= available / 2
        given.append(budgets.expert_cache_bytes)
    assert given == sorted(given)
    with pytest.raises(BudgetError, match=r"takes [0-9.]+ MiB.*half of the [0-9.]+ MiB of RAM available"):
        resolve(et.TierConfig(), table, 2 * smallest - 2)


@pytest.mark.parametrize("host_pool_bytes", [0, 5 * 4096])
def test_row_14_staging_memory_is_counted_and_found_at_the_start(blocks, host_pool_bytes):
    with HostDevice() as device, tiers_on(device, blocks, 3, host_pool_bytes) as tiers:
        for expert in range(10):
            assert wrong_after(blocks, tiers, 0, [expert]) == []
            l2 = tiers.stats().l2
            assert device.pinned_bytes == l2.used_bytes + l2.bounce_bytes <= host_pool_bytes + l2.bounce_bytes
    for nth in (1, 2):
        with HostDevice() as inner:
            device = FaultyDevice(inner, FaultPlan({"alloc_pinned": nth}))
            with pytest.raises(DeviceError):
                tiers_on(device, blocks, 3, host_pool_bytes)
            assert inner.device_bytes == inner.pinned_bytes == 0


def test_row_28_fewer_slots_than_a_batch_uses_are_enough(engine, path, caplog):
    """Down to one slot a layer, one token or many: passes, announced; none at all is refused when planned."""
    with make_tiers(path, 1) as tiers:
        assert "several passes" in caplog.text
        run = run_model(engine, path, tiers, prompt=PROMPT, n_tokens=8)
        assert run.counters.pass_calls == SMALL.layers * 9
        with pytest.raises(ValueError, match="need a slot each"):
            tiers.apply(LayerPlan((1, 0, 1), 0, tiers.arena_bytes))
        with pytest.raises(BudgetError):
            tiers.apply(LayerPlan((2, 2, 2), 0, tiers.arena_bytes))
    assert run.logits.tobytes() == stock(engine, path, tuple(PROMPT), 8, 512)


def test_row_29_the_budget_counts_what_the_allocator_takes(blocks):
    """An allocator that takes twice what is asked gets no more than the budget, all the same."""
    budget = 13 * 4096
    device = WatchedDevice(doubles=True)
    block_bytes = max(layout.block_bytes for layout in blocks.table.slot_layouts)
    assert device.allocation_bytes(block_bytes) > device.inner.allocation_bytes(block_bytes)
    with tiers_on(device, blocks, 2, budget) as tiers:
        bounce = device.inner.pinned_bytes
        for expert in (*range(10), *range(10)):
            for layer in range(2):
                assert wrong_after(blocks, tiers, layer, [expert % (10 - 4 * layer)]) == []
                assert device.inner.pinned_bytes - bounce == tiers.stats().l2.used_bytes <= budget
        assert tiers.stats().l2.used_bytes > 0
        tiers.check_valid()


def test_row_31_every_byte_is_counted_once(blocks):
    demands, layouts = blocks.table.layer_demands(), blocks.table.slot_layouts
    budget = sum(demand.bytes_for(4) for demand in demands)
    plan = plan_layers(demands, budget_bytes=budget)
    ranges = sum(layout.range_bytes(n) for layout, n in zip(layouts, plan.slots, strict=True))
    assert plan.slots == (4, 4)
    assert ranges <= plan.used_bytes <= budget
    for host_pool_bytes in (0, 6 * 4096):  # the pool takes nothing from the slots
        with HostDevice() as device, tiers_on(device, blocks, 4, host_pool_bytes) as tiers:
            assert tiers.slots == plan.slots
            for layer in range(2):
                assert wrong_after(blocks, tiers, layer, range(6)) == []
            stats = tiers.stats()
            assert stats.l1.used_bytes == ranges
            assert device.device_bytes == device.allocation_bytes(budget)
            assert device.pinned_bytes == stats.l2.used_bytes + stats.l2.bounce_bytes
            copies = {key for key, _ in tiers._pool.copies()}
            blocks_bytes = sum(device.allocation_bytes(layouts[layer].block_bytes) for layer, _ in copies)
            assert stats.l2.used_bytes == blocks_bytes
