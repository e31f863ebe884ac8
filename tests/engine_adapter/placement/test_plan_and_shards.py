"""Under tensor split, a device has for its shards what a plan for one card with such experts says.

Only llama.cpp knows how it cuts experts, so `expertier plan` refuses several cards that share tensors. The sizes of
each device follow the same rules all the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from devices.fake_proxy import FakeProxy
from expertier.engine_adapter.llama_cpp import shard_tiers
from expertier.errors import BudgetError
from expertier.planner.budget.allocate import floor_bytes, full_bytes
from expertier.planner.budget.ledger import Consumer
from expertier.planner.budget.ledger_ram import RamConsumer
from expertier.planner.budget.sizing import HEADROOM_BYTES
from expertier.planning_devices import Machine
from expertier.tiers.config.budget import all_copies_bytes
from expertier.tiers.config.config import TierConfig
from expertier.tiers.config.split_mode import SplitMode
from expertier.tiers.engine.prefill_stream import prefill_stream_bytes
from expertier.tiers.model.matrix import Role
from expertier.tiers.model.needs import ModelNeeds
from expertier.tiers.model.table import ExpertTable
from expertier.tiers.split.split_table import SplitTable
from expertier.tiers.split.tensor_cut import TensorCut
from model_files.sizing_cases import SHAPE, Models, few_mib, plan_of, set_ram, shapes, shares


@dataclass(frozen=True)
class Case:
    """A model that several cards share tensor by tensor; `beside` is what a card saves as it has no whole weights."""

    model: ModelNeeds
    cuts: dict[str, TensorCut]
    parts: tuple[ExpertTable, ...]
    cards: tuple[int, ...]
    beside: int
    ram_bytes: int
    config: TierConfig


def cut(table: ExpertTable, n: int) -> dict[str, TensorCut]:
    """Cut experts as llama.cpp does: gate and up between rows, down within them."""
    cuts = {}
    for layer in table.layers:
        for matrix in layer.matrices:
            axis = 0 if matrix.role is Role.DOWN else 1
            width = (matrix.ne0, matrix.ne1)[axis]
            cuts[matrix.name] = TensorCut.of_segments(axis, [(1, [width // n] * n)])
    return cuts


@st.composite
def cases(draw: st.DrawFn, models: Models) -> Case:
    n = draw(st.sampled_from([2, 4]))
    model = models.of(draw(shapes(least_width=32 * n)))
    config = TierConfig(
        split_mode=SplitMode.TENSOR,
        host_pool_percent=draw(st.sampled_from([100, 25, 1])),
        headroom_bytes=draw(few_mib),
        reserve_bytes=draw(few_mib),
        stream_tokens=draw(st.sampled_from(["auto", 0])),
        fill_pool=False,
        fill_threads=0,
    )
    cuts = cut(model.table, n)
    parts = SplitTable.of(model.table, cuts, n).tables
    whole = model.needs_on_one_device(
        0, prefill_stream_bytes=prefill_stream_bytes(config, parts[0], has_own_memory=True)
    )
    beside = whole.weights + whole.kv - round(whole.weights / n) - round(whole.kv / n)
    kept = HEADROOM_BYTES if config.headroom_bytes == "auto" else config.headroom_bytes
    demands = parts[0].layer_demands()
    taken = sum(whole.reserved().values()) - beside + kept + floor_bytes(demands)
    cards = tuple(taken + int(draw(shares) * full_bytes(demands)) for _ in range(n))
    largest = max(layer.expert_bytes for layer in model.table.layers)
    engine = model.geometry.host_weight_bytes + 2 * largest
    ram = n * 2 * engine + int(draw(shares) * 2 * all_copies_bytes(model.table))
    return Case(model, cuts, parts, cards, beside, ram, config)


def compare(case: Case) -> bool:
    """Ask both, and compare; False where both refuse."""
    proxy = FakeProxy({f"CUDA{number}": free for number, free in enumerate(case.cards)})
    n = len(case.cards)

    def planned(part: ExpertTable, free: int) -> Any:
        machine = Machine(int(case.ram_bytes / n), (free + case.beside,), computes_in_slab=False)
        return plan_of(part, case.model.geometry, machine, case.config)

    engine: Any = SimpleNamespace(proxy=proxy)
    try:
        tiers, _ = shard_tiers.open_shard_tiers(engine, case.model.table, case.config, SHAPE)
    except BudgetError:
        with pytest.raises(BudgetError):
            list(map(planned, case.parts, case.cards))
        return False
    whole = case.model.needs_on_one_device(0)
    with tiers:
        for manager, part, free in zip(tiers.managers, case.parts, case.cards, strict=True):
            plan, pool = planned(part, free), manager.stats().l2
            assert manager.ledger is not None
            all_of_it = {Consumer.WEIGHTS: whole.weights, Consumer.KV: whole.kv}
            assert {**manager.ledger.entries, **all_of_it} == plan.devices[0].entries
            assert manager.slots == plan.wide.slots == plan.narrow.slots
            assert min(pool.budget_bytes, all_copies_bytes(manager.table)) == plan.ram.host_pool_bytes
            assert pool.bounce_bytes == plan.ram.entries[RamConsumer.BOUNCE]
    proxy.close()
    return True


def test_a_device_has_for_its_shards_what_a_plan_for_such_experts_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models, at_ram = Models(tmp_path), set_ram(monkeypatch)
    cuts: dict[str, TensorCut] = {}
    asked: Callable[..., Any] = lambda *_: SimpleNamespace(cuts=lambda: cuts)  # noqa: E731
    monkeypatch.setattr(shard_tiers, "ask_tensor_split", asked)
    opened = [0]

    @settings(max_examples=20, suppress_health_check=list(HealthCheck))
    @given(cases(models))
    def compares(case: Case) -> None:
        at_ram(case.ram_bytes)
        cuts.clear()
        cuts.update(case.cuts)
        opened[0] += compare(case)

    compares()
    assert opened[0] > 5
