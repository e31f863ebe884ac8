"""Helpers of the engine tests: small models, tiers with a chosen number of slots, and a generation to compare."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from expertier.engine_adapter.llama_cpp import LlamaModel, LoadedEngine, ProxyCounters
from expertier.engine_adapter.llama_cpp.generation import generate
from expertier.engine_adapter.llama_cpp.model import LoadCounts
from expertier.engine_adapter.models.synth import ModelShape, write_model
from expertier.hip import open_device
from expertier.planner.policy.tables import READY
from expertier.tiers.config.config import TierConfig
from expertier.tiers.manager import TierManager
from expertier.tiers.model.table import ExpertTable
from expertier.tiers.shared.stats import TierStats
from expertier.tiers.tier_set import TierSet

PREFILL_TOKENS = 300
DECODE_TOKENS = 128

SMALL = ModelShape(
    layers=3,
    experts=16,
    top_k=4,
    n_embd=256,
    n_ff=256,
    heads=4,
    kv_heads=2,
    head_dim=64,
    vocab=320,
    seed=11,
    gate_up_type="Q4_K",
    down_type="Q6_K",
)

SHAPES = {
    "F32": replace(SMALL, gate_up_type="F32", down_type="F32"),
    "Q8_0": replace(SMALL, gate_up_type="Q8_0", down_type="Q8_0"),
    "Q4_K+Q6_K": SMALL,
}


def write_small_model(folder: Path, kind: str) -> Path:
    """Write the small model of `kind` (a key of SHAPES) into `folder`."""
    return write_model(folder / f"{kind.replace('+', '_')}.gguf", SHAPES[kind])


def make_tiers(path: Path, n_slots: int, *, host_pool_bytes: int = 0) -> TierManager:
    """Make tiers for the model with exactly `n_slots` slots a layer."""
    table = ExpertTable.from_gguf(path)
    budget = sum(demand.bytes_for(n_slots) for demand in table.layer_demands())
    config = TierConfig(expert_cache_bytes=budget, host_pool_bytes=host_pool_bytes)
    manager = TierManager(table, device=open_device("host"), config=config)
    assert set(manager.slots) == {n_slots}
    return manager


def assert_nothing_held(tiers: TierManager) -> None:
    """Assert that no slot is pinned or filling, though an engine is bound still, and that all is valid."""
    residency = tiers._residency
    assert not residency.pins.any(), f"pinned slots: {np.flatnonzero(residency.pins)}"
    filling = (residency.owner >= 0) & (residency.state & READY == 0)
    assert not filling.any(), f"slots that stayed FILLING: {np.flatnonzero(filling)}"
    tiers.check_valid()


def prompt_tokens(n: int = PREFILL_TOKENS) -> list[int]:
    """A prompt of `n` tokens, always the same."""
    return [1, *np.random.default_rng(3).integers(259, SMALL.vocab, n - 1).tolist()]


@dataclass(frozen=True)
class Run:
    """The output of one generation and what the engine and the proxy said of it."""

    logits: npt.NDArray[np.float32]
    tokens: list[int]
    n_graph_splits: int | None
    flash_attention: bool
    counters: ProxyCounters | None
    stats: TierStats | None
    load: LoadCounts


def run_model(
    engine: LoadedEngine,
    path: Path,
    tiers: TierManager | None,
    *,
    n_ubatch: int = 512,
    n_threads: int = 1,
    n_tokens: int = DECODE_TOKENS,
    prompt: list[int] | None = None,
) -> Run:
    """Generate with all logits kept: stock without repacking, or through `tiers`."""
    with (
        LlamaModel.open(
            engine, path, tiers=TierSet.of(tiers) if tiers is not None else None, repack=False
        ) as model,
        model.context(n_ctx=512, n_ubatch=n_ubatch, n_threads=n_threads) as context,
    ):
        done = generate(context, prompt or prompt_tokens(), n_tokens, keep_logits=True)
        return Run(
            logits=np.stack(done.logits),
            tokens=done.tokens,
            n_graph_splits=context.n_graph_splits,
            flash_attention=context.flash_attention_enabled,
            counters=model.binding.counters() if model.binding is not None else None,
            stats=tiers.stats() if tiers is not None else None,
            load=model.load_counts(),
        )


def assert_same_run(found: Run, expected: Run, *, least_tokens: int) -> None:
    """Assert that a run through the tiers is the stock run: tokens, logits bit for bit, and how the engine ran it.

    The stock run must have `least_tokens` different tokens, as a model that repeats itself would hide a difference.
    """
    assert np.isfinite(expected.logits).all()
    assert len(set(expected.tokens)) >= least_tokens, "a model that repeats itself would hide a difference"
    assert found.tokens == expected.tokens
    different = np.flatnonzero((found.logits != expected.logits).any(axis=1))
    assert different.size == 0, f"rows {different[:8]} differ, first of {different.size}"
    assert found.logits.tobytes() == expected.logits.tobytes()
    assert found.n_graph_splits == expected.n_graph_splits
    assert found.flash_attention == expected.flash_attention
