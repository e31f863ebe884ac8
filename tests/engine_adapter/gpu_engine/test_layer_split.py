"""One model's layers on two devices, tiers on each: the logits of the stock engine on the same two, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from architecture_models import MODELS, slot_counts
from expertier.engine_adapter.placement import Placement
from expertier.tiers.block_weights import read_block_weights
from expertier.tiers.table import ExpertTable
from fake_ggml_gpu.models import assert_same, logits_of, model_path
from fake_ggml_gpu.process import GpuSession, on_fake_gpus
from fake_ggml_gpu.split_models import placed, split_model, split_tiers, stock_split_logits
from tiered_runs import prompt_tokens

PROMPT, TOKENS = prompt_tokens(40), 12
POOLS = {"no pool": 0, "small pool": 3 << 20, "pool": 64 << 20}
LAYERS = 5
KINDS = {kind: replace(MODELS[kind], layers=LAYERS) for kind in ("qwen3moe", "gpt-oss", "deepseek2", "llama")}


def split_path(gpus: GpuSession, kind: str) -> Path:
    """A model of five layers with experts."""
    return model_path(gpus, f"split {kind}", KINDS[kind])


def cut(path: Path, first: int) -> Placement:
    """So many layers with experts on the first device, the others and the output on the second."""
    layers = ExpertTable.from_gguf(path).layers
    before = layers[first].block
    return placed((before, read_block_weights(path).n_blocks + 1 - before))


def cases() -> list[object]:
    """Some kinds of models, numbers of slots, ubatches, pools and places of the cut in turn."""
    found = []
    for number, kind in enumerate(KINDS):
        for place, slots in enumerate(slot_counts(KINDS[kind])):
            turn = number + place
            if number and turn % 2:
                continue
            n_ubatch, pool, staged = (64, 512)[turn % 2], list(POOLS)[turn % 3], turn % 3 != 2
            first = 1 + turn % (LAYERS - 1)
            name = f"{kind}-{slots}-{n_ubatch}-{pool}-{staged}-{first}"
            found.append(pytest.param(kind, slots, n_ubatch, pool, staged, first, id=name))
    return found


@pytest.mark.parametrize(("kind", "slots", "n_ubatch", "pool", "staged", "first"), cases())
@on_fake_gpus
def test_logits_are_bit_identical(gpus: GpuSession, kind, slots, n_ubatch, pool, staged, first):
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
            stream_tokens="auto" if staged else 0,
        ) as tiers,
        split_model(gpus, tiers, placement) as model,
    ):
        for _ in range(1 if pool == "no pool" else 2):
            assert_same(logits_of(model, PROMPT, TOKENS, n_ubatch=n_ubatch), expected)
        counted = [part.counters() for part in model.binding.parts]
    assert all(counters.graphs > TOKENS for counters in counted), "each device runs its part of each graph"
    assert all((counters.staged_calls > 0) == staged or slots == "all" for counters in counted)
