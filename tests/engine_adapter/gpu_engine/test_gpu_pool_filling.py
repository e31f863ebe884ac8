"""L2 filled in the background under an engine on a fake GPU: the same logits, and nothing is read twice."""

from __future__ import annotations

import pytest

from engine_runs.tiered_runs import SMALL, prompt_tokens
from fake_ggml_gpu.models import assert_same, gpu_model, gpu_tiers, logits_of, model_path, stock_logits
from fake_ggml_gpu.process import GpuSession, on_fake_gpus
from model_files.architecture_models import MODELS

PROMPT = prompt_tokens(20)
TOKENS = 8


@pytest.mark.parametrize("pool_bytes", [64 << 20, 1 << 20])
@on_fake_gpus
def test_logits_are_those_of_stock_while_the_pool_is_filled(gpus: GpuSession, pool_bytes: int) -> None:
    path = model_path(gpus, "qwen3moe", MODELS["qwen3moe"])
    expected = stock_logits(gpus, path, PROMPT, TOKENS)
    with (
        gpu_tiers(gpus, path, SMALL.top_k + 1, host_pool_bytes=pool_bytes, fill_pool=True) as tiers,
        gpu_model(gpus, tiers) as model,
    ):
        holds_all = pool_bytes >= 2 * tiers.table.expert_bytes_total
        assert_same(logits_of(model, PROMPT, TOKENS), expected)
        tiers.drain()
        stats = tiers.stats()
        assert stats.l2.ahead_fills > 0
        assert stats.l2.peak_bytes <= pool_bytes
        if holds_all:
            assert stats.file.bytes_read == tiers.table.expert_bytes_total, "each once"
        assert_same(logits_of(model, PROMPT, TOKENS), expected)
        if holds_all:
            assert tiers.stats().file == stats.file, "L2 has them all"
