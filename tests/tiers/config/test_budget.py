"""Budgets: what `auto` takes, its bounds, the hard floor; and what the machine has left."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from expertier.errors import BudgetError
from expertier.planner import plan_layers
from expertier.planner.budget.allocate import floor_bytes, full_bytes
from expertier.planner.budget.ledger import Consumer, DeviceNeeds
from expertier.planner.budget.limited_by import LimitedBy
from expertier.planner.budget.sizing import HEADROOM_BYTES
from expertier.tiers.config.budget import (
    Budgets,
    all_copies_bytes,
    experts_by_size,
    resolve,
    too_small_to_help,
)
from expertier.tiers.config.config import TierConfig
from expertier.tiers.host_pool.chunk_size import block_size
from expertier.tiers.model.table import ExpertTable
from expertier.tiers.shared.host_memory import available_bytes
from expertier.units import GIB, MIB
from model_files.gguf_files import Block, write_model


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> ExpertTable:
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    return write_model(path, [Block(n_experts=16), Block(n_experts=16, n_ff=64)]).table


def test_auto_takes_its_share_in_whole_slots(table: ExpertTable) -> None:
    for percent, n_slots in ((25, 4), (50, 8), (100, 16)):
        budgets = resolve(TierConfig(host_pool_percent=percent), table, 64 * GIB)
        plan = plan_layers(table.layer_demands(), budget_bytes=budgets.expert_cache_bytes)
        assert plan.slots == (n_slots, n_slots)
        assert budgets.host_pool_bytes == 0


def test_auto_leaves_half_of_the_memory(table: ExpertTable) -> None:
    demands = table.layer_demands()
    available = 2 * sum(demand.bytes_for(2) for demand in demands)
    assert resolve(TierConfig(host_pool_percent=50), table, available).expert_cache_bytes == available // 2


def test_auto_gives_at_least_the_floor(table: ExpertTable) -> None:
    floor = floor_bytes(table.layer_demands())
    assert resolve(TierConfig(host_pool_percent=0.1), table, 64 * GIB).expert_cache_bytes == floor


def test_too_little_memory_for_one_slot_a_layer(table: ExpertTable) -> None:
    floor = floor_bytes(table.layer_demands())
    assert resolve(TierConfig(), table, 2 * floor).expert_cache_bytes == floor
    with pytest.raises(
        BudgetError, match=r"one expert slot in each of 2 layers .* MOE_EXPERT_CACHE_MIB to at least 1"
    ):
        resolve(TierConfig(), table, 2 * floor - 2)


def test_a_budget_below_the_floor_says_what_works(table: ExpertTable) -> None:
    floor = floor_bytes(table.layer_demands())
    assert resolve(TierConfig(expert_cache_bytes=floor), table, 0).expert_cache_bytes == floor
    with pytest.raises(
        BudgetError, match=r"asked for 0\.\d+ MiB .* set MOE_EXPERT_CACHE_MIB to at least 1, or"
    ):
        resolve(TierConfig(expert_cache_bytes=floor - 1), table, 0)


def test_no_more_than_a_slot_for_every_expert(table: ExpertTable) -> None:
    full = full_bytes(table.layer_demands())
    assert resolve(TierConfig(expert_cache_bytes=100 * GIB), table, 0).expert_cache_bytes == full


def test_the_pool_gets_what_was_asked(table: ExpertTable) -> None:
    assert resolve(TierConfig(host_pool_bytes=5 * MIB), table, 64 * GIB).host_pool_bytes == 5 * MIB


# ---- a device with memory of its own


def test_auto_takes_the_device_s_free_memory_and_a_share_of_the_experts_for_the_pool(
    table: ExpertTable,
) -> None:
    floor = floor_bytes(table.layer_demands())
    everything = all_copies_bytes(table)
    assert sorted(experts_by_size(table).values()) == [16, 16]
    assert everything == sum(16 * block_size(layout.block_bytes) for layout in table.slot_layouts)
    assert resolve(TierConfig(), table, 64 * GIB, device_free_bytes=floor + HEADROOM_BYTES) == Budgets(
        floor, everything // 4
    )
    for percent in (50, 100):
        config = TierConfig(host_pool_percent=percent, headroom_bytes=0)
        budgets = resolve(config, table, 64 * GIB, device_free_bytes=floor)
        assert budgets.host_pool_bytes == everything * percent // 100


def test_where_all_experts_have_slots_auto_keeps_no_copies_of_them(table: ExpertTable) -> None:
    full = full_bytes(table.layer_demands())
    assert resolve(TierConfig(), table, 64 * GIB, device_free_bytes=GIB) == Budgets(full, 0)
    config = TierConfig(headroom_bytes=0)
    assert resolve(config, table, 64 * GIB, device_free_bytes=full - 1).host_pool_bytes > 0
    capped = TierConfig(expert_cache_bytes=GIB, cap_bytes=full - 1)
    assert resolve(capped, table, 64 * GIB, device_free_bytes=GIB).host_pool_bytes > 0, (
        "the cap keeps some out"
    )
    asked = TierConfig(host_pool_bytes=MIB)
    assert resolve(asked, table, 64 * GIB, device_free_bytes=GIB) == Budgets(full, MIB)


def test_the_pool_leaves_half_of_the_memory_to_the_file_cache(table: ExpertTable) -> None:
    available = all_copies_bytes(table) // 4
    floor = floor_bytes(table.layer_demands())
    config = TierConfig(host_pool_percent=100, headroom_bytes=0)
    budgets = resolve(config, table, available, device_free_bytes=floor)
    assert budgets.host_pool_bytes == available // 2


def test_numbers_are_taken_as_they_are_on_a_device_too(table: ExpertTable) -> None:
    floor = floor_bytes(table.layer_demands())
    config = TierConfig(expert_cache_bytes=floor, host_pool_bytes=5 * MIB)
    assert resolve(config, table, 0, device_free_bytes=0) == Budgets(floor, 5 * MIB)


def test_too_little_device_memory_says_what_is_missing(table: ExpertTable) -> None:
    floor = floor_bytes(table.layer_demands())
    with pytest.raises(
        BudgetError,
        match=r"one expert slot in each of 2 layers takes .* headroom \(.* leave .* give it at least 1 MiB",
    ):
        resolve(TierConfig(headroom_bytes=100), table, 64 * GIB, device_free_bytes=floor + 99)


def test_headroom_reserve_and_cap(table: ExpertTable) -> None:
    floor, full = floor_bytes(table.layer_demands()), full_bytes(table.layer_demands())
    free = full + 4 * MIB - 1000
    ours = TierConfig(headroom_bytes=2 * MIB, reserve_bytes=2 * MIB)
    budgets = resolve(ours, table, 64 * GIB, device_free_bytes=free)
    assert budgets.expert_cache_bytes == full - 1000
    assert budgets.ledger is not None
    assert budgets.ledger.limited_by is LimitedBy.RESERVE
    for free_bytes in (None, free):  # the cap is the host device's too
        config = TierConfig(cap_bytes=floor + 5, headroom_bytes=0)
        capped = resolve(config, table, 64 * GIB, device_free_bytes=free_bytes)
        assert capped.expert_cache_bytes == floor + 5
        asked = TierConfig(cap_bytes=floor + 5, expert_cache_bytes=full)
        assert resolve(asked, table, 64 * GIB, device_free_bytes=free_bytes).expert_cache_bytes == floor + 5
        with pytest.raises(BudgetError, match="set MOE_POOL_CAP_MIB to at least 1"):
            resolve(TierConfig(cap_bytes=floor - 1), table, 64 * GIB, device_free_bytes=free_bytes)


def test_the_engine_s_needs_are_left_to_it(table: ExpertTable) -> None:
    full = full_bytes(table.layer_demands())
    needs = DeviceNeeds(
        free=0, weights=5 * MIB, kv=3 * MIB, compute_wide=2 * MIB, taken={Consumer.KV: 4 * MIB}
    )
    free = full + 7 * MIB - 1000  # weights and compute need 7 MiB, the cache is allocated already
    budgets = resolve(TierConfig(headroom_bytes=0), table, 64 * GIB, device_free_bytes=free, needs=needs)
    assert budgets.expert_cache_bytes == full - 1000
    assert budgets.ledger is not None
    assert budgets.ledger.entries[Consumer.KV] == 4 * MIB


# ---- pools that do not help


def test_a_pool_that_helps_or_is_off_is_not_mentioned(table: ExpertTable) -> None:
    assert too_small_to_help(Budgets(3 * MIB, 0), table) is None
    assert too_small_to_help(Budgets(4096 * 4, 4096 * 4), table) is None
    assert too_small_to_help(Budgets(3 * MIB, all_copies_bytes(table)), table) is None


def test_a_pool_smaller_than_the_slots_or_an_expert_is_mentioned(table: ExpertTable) -> None:
    text = too_small_to_help(Budgets(10 * 4096, 9 * 4096), table)
    assert text is not None
    assert "0.035 MiB is smaller than the 0.039 MiB of expert slots" in text
    largest = max(layout.block_bytes for layout in table.slot_layouts)
    text = too_small_to_help(Budgets(MIB, block_size(largest) - 1), table)
    assert text is not None
    assert "no room for the largest expert" in text


# ---- what the machine has left


class Memory:
    """A machine with 10 GiB available, and control groups as files."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "cgroup"
        self.own = folder / "self"

    def group(self, path: str, files: dict[str, str]) -> None:
        folder = self.root / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name).write_text(content)

    def available(self) -> int:
        return available_bytes(self.root, self.own)


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Memory:
    class Virtual:
        available = 10 * GIB

    monkeypatch.setattr(psutil, "virtual_memory", Virtual)
    return Memory(tmp_path)


def test_without_control_groups_the_machine_decides(memory: Memory) -> None:
    assert memory.available() == 10 * GIB


def test_version_2_takes_the_tightest_group_around(memory: Memory) -> None:
    memory.own.write_text("0::/user/job\n")
    memory.group("user/job", {"memory.max": "max", "memory.current": "5"})
    memory.group(
        "user",
        {
            "memory.max": f"{4 * GIB}\n",
            "memory.current": f"{3 * GIB}\n",
            "memory.stat": f"anon 7\ninactive_file {GIB}\nactive_file 3\n",
        },
    )
    assert memory.available() == 2 * GIB


def test_a_group_that_does_not_say_what_is_cached(memory: Memory) -> None:
    memory.own.write_text("0::/x\n")
    memory.group("x", {"memory.max": str(3 * GIB), "memory.current": str(GIB), "memory.stat": "anon 7\n"})
    assert memory.available() == 2 * GIB


def test_version_2_at_the_root_of_a_container(memory: Memory) -> None:
    memory.own.write_text("0::/\n")
    memory.group(".", {"memory.max": str(GIB), "memory.current": str(2 * GIB)})
    assert memory.available() == 0


def test_version_1(memory: Memory) -> None:
    memory.own.write_text("5:cpu,cpuacct:/job\n4:memory:/job\n")
    memory.group(
        "memory/job",
        {
            "memory.limit_in_bytes": str(3 * GIB),
            "memory.usage_in_bytes": str(2 * GIB),
            "memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB // 2}\n",
        },
    )
    assert memory.available() == GIB + GIB // 2


def test_files_that_make_no_sense_are_left_out(memory: Memory) -> None:
    memory.own.write_text("0::/x\n")
    memory.group("x", {"memory.max": "lots", "memory.current": "1"})
    assert memory.available() == 10 * GIB


def test_the_real_machine_has_some() -> None:
    assert 0 <= available_bytes() <= psutil.virtual_memory().total
