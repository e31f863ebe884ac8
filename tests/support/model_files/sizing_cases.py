"""Models, wishes and RAM to compare the sizes of a plan with those of tiers that are opened."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import strategies as st

from expertier.engine_adapter.models.model_shape import ModelShape
from expertier.engine_adapter.models.synth import write_model
from expertier.planner.budget.context_memory import ContextShape
from expertier.planner.budget.geometry import ModelGeometry
from expertier.planner.predict.hit_rates import FromExperience
from expertier.planner.predict.rates import MachineRates, PathRate
from expertier.planning import Planned, make_plan
from expertier.planning_devices import Inputs, Machine
from expertier.tiers.config.config import TierConfig
from expertier.tiers.model.needs import ModelNeeds
from expertier.tiers.model.table import ExpertTable
from expertier.tiers.shared import host_memory
from expertier.units import MIB

SHAPE = ContextShape(n_ctx=512, n_ubatch=64, full_windows=True)
_RATES = MachineRates(*(PathRate(1e9) for _ in range(5)))


class Models:
    """The models of the cases, written once each: headers, and holes in the place of weights."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[ModelShape, ModelNeeds] = {}

    def of(self, shape: ModelShape) -> ModelNeeds:
        if shape not in self._known:
            path = write_model(self._folder / f"{len(self._known)}.gguf", shape, holes=True)
            self._known[shape] = ModelNeeds.of(ExpertTable.from_gguf(path), SHAPE)
        return self._known[shape]


shares = st.sampled_from([0.01, 0, 0.1, 0.25, 0.5, 0.75, 0.999, 1.2])
"""Parts of all experts, and more than all of them."""

few_mib = st.just("auto") | st.integers(0, 4 * MIB)


@st.composite
def shapes(draw: st.DrawFn, *, least_layers: int = 1, least_width: int = 32) -> ModelShape:
    """Models of a few small experts, or of GiBs of large ones."""
    experts = draw(st.integers(2, 16))
    return ModelShape(
        layers=draw(st.integers(least_layers, 6)), experts=experts, top_k=draw(st.integers(1, min(experts, 3))),
        n_embd=draw(st.sampled_from([64, 1024])), n_ff=least_width * draw(st.sampled_from([1, 2, 16, 128])),
        heads=2, kv_heads=1, head_dim=32, vocab=300, seed=1, gate_up_type="F32", down_type="F32",
        layer_types=draw(st.sampled_from([(), (("F32", "F32"), ("Q8_0", "Q8_0"))])),
    )  # fmt: skip


def plan_of(table: ExpertTable, geometry: ModelGeometry, machine: Machine, config: TierConfig) -> Planned:
    """Plan for contexts of `SHAPE`."""
    demands = table.layer_demands()
    hits = FromExperience(demands)
    return make_plan(Inputs(table, geometry, SHAPE, machine, config, _RATES, hits, demands=demands))


def set_ram(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return what lets the machine have so many bytes of RAM available.

    A plan counts nothing for the process itself, so that RAM binds for small models as well.
    """
    ram = [0]
    monkeypatch.setattr(host_memory, "machine_available_bytes", lambda: ram[0])
    monkeypatch.setattr("expertier.tiers.config.room.total_bytes", lambda: 1 << 50)
    monkeypatch.setattr("expertier.planning.ENGINE_RAM_BYTES", 0)
    return lambda n_bytes: ram.__setitem__(0, n_bytes)
