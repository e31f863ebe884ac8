"""Helpers of the trace model's tests: routing to replay, shapes, and runs on the engine and on the policy alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from expertier.engine_adapter.binding.lookup_log import LookupLog
from expertier.engine_adapter.llama_cpp import LlamaContext, LlamaModel, LoadedEngine
from expertier.engine_adapter.models.model_shape import ModelShape
from expertier.engine_adapter.models.trace_ids import read_trace_ids
from expertier.engine_adapter.models.trace_model import default_width
from expertier.planner import PolicyKind
from expertier.planner.policy.residency import Residency
from expertier.testing.unlocked_calls import unlocked
from expertier.tiers.manager import TierManager
from expertier.tiers.tier_set import TierSet

I32 = npt.NDArray[np.int32]

RECORDED = Path(__file__).parents[3].parent / "shared" / "traces" / "gptoss20b" / "gptoss20b_ids_only.npz"
"""Recorded gpt-oss-20b routing, which is not part of the repository: 24 layers, top-4 of 32."""


def recorded_ids(steps: int) -> I32:
    """The first steps of the recorded routing; skips the test where it is not there."""
    if not RECORDED.exists():
        pytest.skip(f"recorded routing is not there: {RECORDED}")
    return read_trace_ids(RECORDED, steps=steps)


def random_ids(*, steps: int, layers: int, experts: int, top_k: int) -> I32:
    """Routing with some locality: int32 [steps, layers, top_k]."""
    random = np.random.default_rng([steps, layers, experts])
    heat = random.standard_normal((layers, experts))
    ids = []
    for _ in range(steps):
        heat = 0.9 * heat + 0.4 * random.standard_normal((layers, experts))
        ids.append(np.argsort(-heat, axis=1)[:, :top_k])
    return np.ascontiguousarray(ids, np.int32)


def shape_for(ids: I32, experts: int, architecture: str = "qwen3moe") -> ModelShape:
    """A small shape that can replay `ids`: experts of 32 columns, Q8_0."""
    n_embd = max(default_width(ids.shape[1], experts, "Q8_0"), 64)
    heads = n_embd // 64
    return ModelShape(
        layers=1, experts=experts, top_k=1, n_embd=n_embd, n_ff=32, heads=heads, kv_heads=heads, head_dim=64,
        vocab=300, seed=5, gate_up_type="Q8_0", down_type="Q8_0", dense_type="Q8_0", architecture=architecture,
        expert_layout="no gate" if architecture == "nemotron_h_moe" else "split",
    )  # fmt: skip


@contextmanager
def opened(
    engine: LoadedEngine, path: Path, tiers: TierManager, n_ctx: int, log: LookupLog
) -> Iterator[tuple[LlamaModel, LlamaContext]]:
    """A model on the engine with a context, on one thread, its look-ups logged."""
    with (
        LlamaModel.open(engine, path, tiers=TierSet.of(tiers), lookups=log) as model,
        model.context(n_ctx=n_ctx, n_threads=1) as context,
    ):
        yield model, context


def replayed(ids: I32, n_experts: int, n_slots: int, kind: PolicyKind) -> tuple[int, int]:
    """Run `ids` through the policy alone, as the proxy asks it: in ascending order. Returns hits and misses."""
    n_layers, top_k = ids.shape[1:]
    residency = Residency([n_experts] * n_layers, [n_slots] * n_layers, kind)
    slots, miss_index = np.zeros(top_k, np.int32), np.zeros(top_k, np.int32)
    for step in np.sort(ids, axis=2):
        for layer, experts in enumerate(step):
            assert unlocked(residency).begin(layer, experts, slots, miss_index) >= 0
            unlocked(residency).complete(layer, slots)
            unlocked(residency).release(layer, slots)
    totals = residency.totals()
    return totals["hits"], totals["misses"]
