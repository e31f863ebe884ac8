"""What tests of RPC servers do in processes of their own: an engine keeps its servers until it ends."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from expertier.engine_adapter.generation import generate
from expertier.engine_adapter.llama_cpp import LlamaModel
from expertier.engine_adapter.open_engine import open_engine
from expertier.engine_adapter.tiered_model import TieredModel
from expertier.errors import EngineError
from expertier.tiers.config import TierConfig
from expertier.tiers.table import ExpertTable
from tiered_runs import SMALL, prompt_tokens

_POOL_BYTES = 64 << 20


def _logits(model: LlamaModel, n_ubatch: int) -> np.ndarray:
    with model.context(n_ctx=512, n_ubatch=n_ubatch, n_threads=1) as context:
        return np.stack(generate(context, prompt_tokens(), 24, keep_logits=True).logits)


def compare(llama_cpp: Path, server: str, path: Path) -> dict[str, int]:
    """In a process of its own: stock with everything on the server, and the tiers there."""
    engine = open_engine(llama_cpp, rpc_servers=[server])
    table = ExpertTable.from_gguf(path)
    served = {"whole": 0, "host_fills": 0, "staged": 0}
    for n_ubatch in (64, 512):
        with LlamaModel.open(engine, path, repack=False, inner_device="RPC0") as stock:
            expected = _logits(stock, n_ubatch)
        for n_slots, pool_bytes in (
            (SMALL.experts, 0),
            (SMALL.experts // 2, _POOL_BYTES),
            (SMALL.top_k, 0),
            (1, _POOL_BYTES),
        ):
            budget = sum(demand.bytes_for(n_slots) for demand in table.layer_demands())
            config = TierConfig(expert_cache_bytes=budget, host_pool_bytes=pool_bytes, engine_device="RPC0")
            with TieredModel.open(engine, table, config) as tiered:
                for _ in range(2):
                    assert (_logits(tiered.model, n_ubatch) == expected).all(), (n_ubatch, n_slots)
                tiered.tiers.check_valid()
                counters = tiered.binding.counters()
                served["whole"] += counters.whole_calls
                served["host_fills"] += counters.host_fills
                served["staged"] += counters.staged_calls
    return served


def refused(llama_cpp: Path | None, endpoint: str) -> str:
    try:
        open_engine(llama_cpp, rpc_servers=[endpoint])
    except EngineError as error:
        return str(error)
    return ""
