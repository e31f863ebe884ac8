"""Logits of the tiers on a device against stock with everything there, in a process that has an engine with it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from engine_runs.tiered_runs import SMALL, prompt_tokens
from expertier.engine_adapter.llama_cpp import LlamaModel, LoadedEngine
from expertier.engine_adapter.llama_cpp.generation import generate
from expertier.engine_adapter.tiered_model import TieredModel
from expertier.tiers.config.config import TierConfig
from expertier.tiers.model.table import ExpertTable

POOL_BYTES = 64 << 20

CASES = ((SMALL.experts, 0), (SMALL.experts // 2, POOL_BYTES), (SMALL.top_k, 0), (1, POOL_BYTES))
"""Slots a layer, and bytes of L2."""


def _logits(model: LlamaModel, prompt: Sequence[int], n_tokens: int, n_ubatch: int) -> np.ndarray:
    with model.context(n_ctx=512, n_ubatch=n_ubatch, n_threads=1) as context:
        return np.stack(generate(context, prompt, n_tokens, keep_logits=True).logits)


def compare_on(
    engine: LoadedEngine,
    device: str,
    path: Path,
    *,
    prompt: Sequence[int] | None = None,
    n_tokens: int = 24,
    widths: Sequence[int] = (64, 512),
    cases: Sequence[tuple[int, int]] = CASES,
) -> dict[str, int]:
    """Compare a prompt and what follows, twice over, in batches of each of `widths`; returns calls by their ways."""
    prompt = prompt if prompt is not None else prompt_tokens()
    table = ExpertTable.from_gguf(path)
    served = {"whole": 0, "looked_up": 0, "host_fills": 0, "streamed": 0}
    for n_ubatch in widths:
        with LlamaModel.open(engine, path, repack=False, inner_device=device) as stock:
            expected = _logits(stock, prompt, n_tokens, n_ubatch)
        for n_slots, pool_bytes in cases:
            budget = sum(demand.bytes_for(n_slots) for demand in table.layer_demands())
            config = TierConfig(expert_cache_bytes=budget, host_pool_bytes=pool_bytes, engine_device=device)
            with TieredModel.open(engine, table, config) as tiered:
                for _ in range(2):
                    found = _logits(tiered.model, prompt, n_tokens, n_ubatch)
                    assert (found == expected).all(), (n_ubatch, n_slots)
                tiered.tiers.check_valid()
                counters = tiered.binding.counters()
                served["whole"] += counters.fully_resident_calls
                served["looked_up"] += counters.lookups
                served["host_fills"] += counters.host_fills
                served["streamed"] += counters.streamed_calls
    return served
