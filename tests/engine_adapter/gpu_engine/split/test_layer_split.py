"""One model's layers on two devices, tiers on each: the logits of the stock engine on the same two, bit for bit."""

from __future__ import annotations

import pytest

from engine_runs.tiered_runs import prompt_tokens
from fake_ggml_gpu.models import assert_same, logits_of
from fake_ggml_gpu.process import GpuSession, on_fake_gpus
from fake_ggml_gpu.split_models import (
    KINDS,
    LAYERS,
    cut,
    split_model,
    split_path,
    split_tiers,
    stock_split_logits,
)
from model_files.architecture_models import slot_counts

PROMPT, TOKENS = prompt_tokens(40), 12
POOLS = {"no pool": 0, "small pool": 3 << 20, "pool": 64 << 20}


def cases() -> list[object]:
    """Some kinds of models, numbers of slots, ubatches, pools and places of the cut in turn."""
    found = []
    for number, kind in enumerate(("qwen3moe", "gpt-oss", "deepseek2", "llama", "glm4moe")):
        for place, slots in enumerate(slot_counts(KINDS[kind])):
            turn = number + place
            if number and turn % 2:
                continue
            n_ubatch, pool, streamed = (64, 512)[turn % 2], list(POOLS)[turn % 3], turn % 3 != 2
            first = 1 + turn % (LAYERS - 1)
            name = f"{kind}-{slots}-{n_ubatch}-{pool}-{streamed}-{first}"
            marks = [pytest.mark.deep] * (slots == "one")  # slow, and below top-k is the same way
            found.append(pytest.param(kind, slots, n_ubatch, pool, streamed, first, id=name, marks=marks))
    return found


@pytest.mark.parametrize(("kind", "slots", "n_ubatch", "pool", "streamed", "first"), cases())
@on_fake_gpus
def test_logits_are_bit_identical(gpus: GpuSession, kind, slots, n_ubatch, pool, streamed, first):
    path = split_path(gpus, kind)
    expected = stock_split_logits(gpus, path, PROMPT, TOKENS, n_ubatch=n_ubatch)
    gpus.fakes.switch(jitter_us=100, seed=first)
    placement = cut(path, first)
    with (
        split_tiers(
            gpus,
            path,
            slot_counts(KINDS[kind])[slots],
            placement,
            host_pool_bytes=POOLS[pool],
            stream_tokens="auto" if streamed else 0,
        ) as tiers,
        split_model(gpus, tiers, placement) as model,
    ):
        for _ in range(1 if pool == "no pool" else 2):
            assert_same(logits_of(model, PROMPT, TOKENS, n_ubatch=n_ubatch), expected)
        counted = [each.counters() for each in model.binding.bindings]
    assert all(counters.graphs > TOKENS for counters in counted), "each device runs its share of each graph"
    assert all((counters.streamed_calls > 0) == streamed or slots == "all" for counters in counted)


@pytest.mark.deep
@pytest.mark.parametrize("first", [2, LAYERS - 1])
@pytest.mark.parametrize("kind", KINDS)
@on_fake_gpus
def test_every_architecture(gpus: GpuSession, kind, first):
    path = split_path(gpus, kind)
    expected = stock_split_logits(gpus, path, PROMPT, TOKENS, n_ubatch=64)
    placement = cut(path, first)
    with (
        split_tiers(
            gpus, path, KINDS[kind].experts // 2, placement, host_pool_bytes=POOLS["small pool"]
        ) as tiers,
        split_model(gpus, tiers, placement) as model,
    ):
        assert_same(logits_of(model, PROMPT, TOKENS, n_ubatch=64), expected)
