"""What `plan` says and what tiers get when they are opened: the same numbers, for models, cards, splits and wishes.

Both are asked at their own doors: `make_plan` with a machine of numbers, and `open_layer_tiers` on the plugin's C
functions, of which `fake_proxy` has those for memory.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from devices.fake_proxy import FakeProxy
from expertier.engine_adapter.llama_cpp.layer_tiers import open_layer_tiers
from expertier.errors import BudgetError, ConfigError, DeviceError
from expertier.planner.budget.allocate import floor_bytes, full_bytes
from expertier.planner.budget.ledger import Consumer
from expertier.planner.budget.ledger_ram import RamConsumer
from expertier.planner.budget.limited_by import LimitedBy
from expertier.planner.budget.sizing import HEADROOM_BYTES
from expertier.planning import Planned
from expertier.planning_devices import Machine
from expertier.tiers.config.budget import all_copies_bytes
from expertier.tiers.config.config import TierConfig
from expertier.tiers.engine.prefill_stream import prefill_stream_bytes
from expertier.tiers.model.needs import ModelNeeds
from expertier.tiers.model.slot_layout import RANGE_ALIGNMENT
from expertier.units import round_up
from model_files.sizing_cases import SHAPE, Models, few_mib, plan_of, set_ram, shapes, shares


@dataclass(frozen=True)
class Case:
    """A model on a machine, with a user's wishes. `cards` is the free memory of each; none: the host computes."""

    model: ModelNeeds
    cards: tuple[int, ...]
    ram_bytes: int
    config: TierConfig

    @property
    def names(self) -> list[str]:
        return [f"CUDA{number}" for number in range(len(self.cards))] or ["CPU"]


@dataclass(frozen=True)
class Numbers:
    """Sizes as both sides have them: of each device, and of all."""

    slabs: list[int]
    wide_slots: tuple[int, ...]
    narrow_slots: tuple[int, ...]
    pool_bytes: int
    bounce_bytes: int


@st.composite
def cases(draw: st.DrawFn, models: Models, n: int) -> Case:
    model = models.of(draw(shapes(least_layers=max(n, 1))))
    demands, copies = model.table.layer_demands(), all_copies_bytes(model.table)
    floor, full = floor_bytes(demands), full_bytes(demands)

    enough = st.sampled_from([1] * 9 + [0.9])

    def wish(least: int, most: int) -> st.SearchStrategy[Any]:
        size = st.builds(lambda part, share: int(part * least + share * most) + 1, enough, shares)
        return st.just("auto") | size

    config = TierConfig(
        expert_cache_bytes=draw(wish(floor, full)),
        host_pool_bytes=draw(wish(0, copies) | st.just(0)),
        host_pool_percent=draw(st.sampled_from([100, 25, 1])),
        headroom_bytes=draw(few_mib),
        reserve_bytes=draw(few_mib),
        cap_bytes=draw(wish(floor, full)),
        stream_tokens=draw(st.sampled_from(["auto", 0, 16])),
        slab_compute=draw(st.sampled_from(["auto", True, False])) if n else "auto",
        tensor_split=draw(st.just("auto") | st.tuples(*[st.sampled_from([1.0, 2.0])] * n))
        if n > 1
        else "auto",
        engine_device="auto" if draw(st.booleans()) else ",".join(f"CUDA{i}" for i in range(n)) or "CPU",
        fill_pool=False,
        fill_threads=0,
    )
    stream = prefill_stream_bytes(config, model.table, has_own_memory=n > 0)
    taken = sum(model.needs_on_one_device(0, prefill_stream_bytes=stream).reserved().values())
    kept = HEADROOM_BYTES if config.headroom_bytes == "auto" else config.headroom_bytes
    wished = 0 if config.expert_cache_bytes == "auto" else min(config.expert_cache_bytes, full)
    beside = taken + kept + (0 if config.reserve_bytes == "auto" else config.reserve_bytes)
    cards = tuple(
        beside + max(int(draw(enough) * floor + draw(shares) * full), draw(st.sampled_from([wished, 0])))
        for _ in range(n)
    )
    largest = max(layer.expert_bytes for layer in model.table.layers)
    engine = (
        model.geometry.host_weight_bytes + 2 * max(n, 1) * round_up(largest, 1 << 12) + (0 if n else taken)
    )
    asked = 0 if config.host_pool_bytes == "auto" else config.host_pool_bytes
    often = draw(st.sampled_from([2, 2, 2, 1.2])) if n else 2  # below 2 the pool gets less than half of RAM
    ram = int(often * (engine + asked + (0 if n else wished))) + int(draw(shares) * copies) + 1
    return Case(model, cards, ram, config)


def planned(case: Case, cards: tuple[int, ...]) -> Planned:
    return plan_of(case.model.table, case.model.geometry, Machine(case.ram_bytes, cards), case.config)


def of_plan(plan: Planned, case: Case) -> Numbers:
    in_slab = case.config.slab_compute is not False
    computing = [
        ledger.entries[Consumer.COMPUTE_NARROW] + ledger.entries[Consumer.COMPUTE_WIDE]
        for ledger in plan.devices
    ]
    slabs = [
        ledger.arena_bytes + (round_up(n_bytes, RANGE_ALIGNMENT) if in_slab else 0)
        for ledger, n_bytes in zip(plan.devices, computing, strict=True)
    ]
    return Numbers(
        slabs or [plan.ram.entries[RamConsumer.ARENA]],
        plan.wide.slots,
        plan.narrow.slots,
        plan.ram.host_pool_bytes,
        plan.ram.entries[RamConsumer.BOUNCE],
    )


def of_run(case: Case, proxy: FakeProxy) -> tuple[Numbers, list[int], list[Any]]:
    """Open the tiers as `run` does; return their numbers, which cards they are on, and the ledgers of `auto`."""
    model = case.model
    tiers, placement = open_layer_tiers(proxy, model.table, case.config, SHAPE)  # type: ignore[arg-type]
    with tiers:
        each = tiers.managers
        pools = [manager.stats().l2 for manager in each]
        slabs = [manager.arena_bytes for manager in each]
        wide = tiers.slots
        for number, manager in enumerate(each):
            if manager.engine.computes_in_slab:
                units = placement.blocks()[number]
                needs = model.needs_of_share(units, 0) if placement.is_split else model.needs_on_one_device(0)
                manager.engine.bind()
                manager.engine.move_boundary(needs.compute_narrow)
                manager.engine.unbind()
        numbers = Numbers(
            slabs,
            wide,
            tiers.slots,
            sum(
                min(pool.budget_bytes, all_copies_bytes(m.table)) for pool, m in zip(pools, each, strict=True)
            ),
            sum(pool.bounce_bytes for pool in pools),
        )
        return numbers, [case.names.index(name) for name in placement.devices], [m.ledger for m in each]


def compare(case: Case, seen: Counter[str]) -> None:
    """Ask both, and compare. `seen` counts what was compared."""
    proxy = FakeProxy(dict(zip(case.names, case.cards, strict=False)))
    try:
        numbers, chosen, ledgers = of_run(case, proxy)
    except (BudgetError, ConfigError, DeviceError) as refusal:
        seen["refused"] += 1
        if case.config.engine_device == "auto" and len(case.cards) > 1:
            return  # it says which cards `auto` took, if any
        kind = BudgetError if isinstance(refusal, DeviceError) else type(refusal)
        with pytest.raises(kind):
            planned(case, case.cards)
        return
    finally:
        proxy.close()
    cards = tuple(case.cards[number] for number in chosen) if case.cards else ()
    try:
        plan = planned(case, cards)
    except BudgetError:
        # A size that the user set is taken as it is; only the plan looks whether all else fits beside it.
        assert case.config.expert_cache_bytes != "auto"
        seen["does not fit"] += 1
        return
    if not plan.ram.entries[RamConsumer.PAGE_CACHE]:  # the pool's budget is more than RAM has room for
        seen["short of RAM"] += 1
        assert plan.ram.host_pool_bytes <= numbers.pool_bytes
        numbers = replace(numbers, pool_bytes=plan.ram.host_pool_bytes)
    assert of_plan(plan, case) == numbers
    for ours, theirs in zip(ledgers, plan.devices, strict=False):
        if ours is not None:
            assert (ours.total_bytes, ours.entries) == (theirs.total_bytes, theirs.entries)
    seen.update({f"on {len(cards)}", *(f"arena {ledger.limited_by}" for ledger in plan.devices)})
    seen[f"pool {plan.ram.limited_by}"] += 1


def compare_many(
    folder: Path, monkeypatch: pytest.MonkeyPatch, n_cards: int, n_examples: int
) -> Counter[str]:
    """Compare for so many cards; return how often a refusal, a number of devices and each limit were seen."""
    models, at_ram = Models(folder), set_ram(monkeypatch)
    seen: Counter[str] = Counter()

    @settings(max_examples=n_examples, suppress_health_check=list(HealthCheck))
    @given(cases(models, n_cards))
    def compares(case: Case) -> None:
        at_ram(case.ram_bytes)
        compare(case, seen)

    compares()
    assert seen[f"on {n_cards}"] > n_examples // 10, seen
    return seen


@pytest.mark.parametrize("n_cards", range(4))
def test_plan_says_what_run_gets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_cards: int) -> None:
    seen = compare_many(tmp_path, monkeypatch, n_cards, 40 if n_cards else 80)
    if n_cards:
        assert seen["arena slots"], seen
        assert seen["arena reserve"] + seen["arena cap"], seen


@pytest.mark.deep
@pytest.mark.parametrize("n_cards", range(4))
def test_plan_says_what_run_gets_for_many_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_cards: int
) -> None:
    seen = compare_many(tmp_path, monkeypatch, n_cards, 500)
    for limit in (LimitedBy.SLOTS, LimitedBy.RESERVE, LimitedBy.CAP, LimitedBy.POOL) if n_cards else ():
        assert seen[f"arena {limit}"], seen
    for limit in (LimitedBy.SLOTS, LimitedBy.POOL, LimitedBy.RAM) if n_cards else (LimitedBy.POOL,):
        assert seen[f"pool {limit}"], seen
