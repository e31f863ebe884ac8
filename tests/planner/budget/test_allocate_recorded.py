"""Plans from recorded routing against an exact dynamic programme, where the recordings are there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from expertier.planner import LayerDemand, plan_layers
from expertier.planner.budget.allocate_by_profile import marginal_gains, saved_bytes
from expertier.planner.profiles.of_trace import count_uses
from expertier.planner.traces.file import read_trace

TRACES = Path(__file__).parents[3].parent / "shared" / "traces"
FILES = ("bigmoe_route/qwen.route.csv", "bigmoe_route/gemma.route.csv", "bigmoe_route/gptoss.route.csv")


def recorded(name: str, sizes: tuple[int, ...]) -> tuple[list[LayerDemand], npt.NDArray[np.int64]]:
    """The uses of a recording, and layers of slots of these sizes in turn."""
    path = TRACES / name
    if not path.exists():
        pytest.skip(f"recorded routing is not there: {path}")
    trace = read_trace(path)
    demands = [
        LayerDemand(layer=i, n_experts=int(n), top_k=2, slot_bytes=sizes[i % len(sizes)], fixed_bytes=0)
        for i, n in enumerate(trace.n_experts)
    ]
    return demands, count_uses(trace)


def optimum(demands: list[LayerDemand], uses: npt.NDArray[np.int64], budget: int) -> float:
    """The most that any plan with two slots a layer saves: exact, over every number of bytes."""
    best = np.full(budget + 1, -np.inf)
    best[0] = 0.0
    for demand, row in zip(demands, uses, strict=True):
        saved = np.concatenate(
            ([0.0], np.cumsum(-np.sort(-row[: demand.n_experts])) * float(demand.slot_bytes))
        )
        after = np.full(budget + 1, -np.inf)
        for n in range(2, demand.n_experts + 1):
            size = n * demand.slot_bytes
            if size <= budget:
                after[size:] = np.maximum(after[size:], best[: budget + 1 - size] + saved[n])
        best = after
    return float(best.max())


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("sizes", [(1,), (4, 5, 6)])
def test_a_plan_saves_what_the_optimum_saves(name: str, sizes: tuple[int, ...]) -> None:
    demands, uses = recorded(name, sizes)
    gains = marginal_gains(demands, uses)
    for share in (0.25,) if len(sizes) > 1 else (0.1, 0.4):
        budget = int(share * sum(demand.n_experts * demand.slot_bytes for demand in demands))
        plan = plan_layers(demands, budget_bytes=budget, profile=uses)
        found, best = saved_bytes(demands, gains, plan.slots), optimum(demands, uses, budget)
        slack = 0.0 if len(sizes) == 1 else float(gains.max()) * max(sizes)
        assert best - slack <= found <= best + 1e-6
        uniform = plan_layers(demands, budget_bytes=budget)
        assert found > saved_bytes(demands, gains, uniform.slots)
