"""A device look-up of decode graphs on each of two devices: the same logits, and each looks up its own layers."""

from __future__ import annotations

import pytest

from engine_runs.tiered_runs import SMALL, assert_nothing_held, prompt_tokens
from fake_ggml_gpu.device_lookups import open_device_lookup
from fake_ggml_gpu.models import assert_same, logits_of
from fake_ggml_gpu.process import GpuSession, on_fake_gpus
from fake_ggml_gpu.split_models import cut, split_model, split_path, split_tiers, stock_split_logits

PROMPT, TOKENS = prompt_tokens(20), 24
KIND = "qwen3moe"


@pytest.mark.parametrize("with_lookup", [(0, 1), pytest.param((1,), marks=pytest.mark.deep)])
@pytest.mark.parametrize("pool_bytes", [64 << 20, 2 << 20])
@on_fake_gpus
def test_logits_are_bit_identical(gpus: GpuSession, pool_bytes, with_lookup):
    path = split_path(gpus, KIND)
    expected = stock_split_logits(gpus, path, PROMPT, TOKENS)
    gpus.fakes.switch(jitter_us=50, seed=pool_bytes)
    placement = cut(path, 2)
    with (
        gpus.fakes.device_lookup(0) as first,
        gpus.fakes.device_lookup(1) as second,
        split_tiers(gpus, path, SMALL.top_k + 1, placement, host_pool_bytes=pool_bytes) as tiers,
        split_model(gpus, tiers, placement) as model,
    ):
        bindings = model.binding.bindings
        for i in with_lookup:
            assert open_device_lookup(gpus, bindings[i], (first, second)[i]) == ""
        for _ in range(2):  # the first run's misses are read from the file
            assert_same(logits_of(model, PROMPT, TOKENS), expected)
        counted = [binding.counters() for binding in bindings]
        for manager in tiers.managers:
            assert_nothing_held(manager)
    for i, counters in enumerate(counted):
        if i not in with_lookup:
            assert counters.device_lookups == 0
        elif pool_bytes == 64 << 20:
            assert counters.device_lookups > TOKENS, counters
            assert counters.device_lookup_waits > 0, counters
        else:
            assert counters.device_lookup_fallbacks > 0, counters
