"""With the slots in a device's memory: the logits of the stock engine on the same device, bit for bit."""

from __future__ import annotations

import pytest

from engine_runs.tiered_runs import prompt_tokens
from fake_ggml_gpu.models import assert_same, gpu_model, gpu_tiers, logits_of, model_path, stock_logits
from fake_ggml_gpu.process import GpuSession, on_fake_gpus
from model_files.architecture_models import MODELS, slot_counts

KINDS = ("qwen3moe", "gpt-oss", "deepseek2", "qwen3moe, mixed")
PREFILL, DECODE = 80, 16
POOLS = {"no pool": 0, "small pool": 3 << 20, "pool": 64 << 20}


def cases() -> list[object]:
    """The first model with every number of slots, the others with some; ubatches, pools and staging in turn."""
    found = []
    for number, kind in enumerate(KINDS):
        for place, slots in enumerate(slot_counts(MODELS[kind])):
            if number and place % 2:
                continue
            turn = number + place
            n_ubatch, pool, streamed = (
                (64, 512)[turn % 2],
                list(POOLS)[turn % 3],
                (True, True, False)[turn % 3],
            )
            found.append(
                pytest.param(
                    kind, slots, n_ubatch, pool, streamed, id=f"{kind}-{slots}-{n_ubatch}-{pool}-{streamed}"
                )
            )
    return found


def assert_parity(gpus: GpuSession, kind: str, slots: str, n_ubatch: int, pool: str, streamed: bool) -> None:
    path = model_path(gpus, kind, MODELS[kind])
    prompt = prompt_tokens(PREFILL)
    expected = stock_logits(gpus, path, prompt, DECODE, n_ubatch=n_ubatch)
    with (
        gpu_tiers(
            gpus,
            path,
            slot_counts(MODELS[kind])[slots],
            host_pool_bytes=POOLS[pool],
            stream_tokens="auto" if streamed else 0,
        ) as tiers,
        gpu_model(gpus, tiers) as model,
    ):
        assert_same(logits_of(model, prompt, DECODE, n_ubatch=n_ubatch), expected)
        if pool != "no pool":  # again, with copies in the pool from the beginning
            assert_same(logits_of(model, prompt, DECODE, n_ubatch=n_ubatch), expected)
        counters = model.binding.counters()
    assert (counters.streamed_calls > 0) == streamed or slots == "all"


@pytest.mark.parametrize(("kind", "slots", "n_ubatch", "pool", "streamed"), cases())
@on_fake_gpus
def test_logits_are_bit_identical(gpus: GpuSession, kind, slots, n_ubatch, pool, streamed):
    assert_parity(gpus, kind, slots, n_ubatch, pool, streamed)


@pytest.mark.deep
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("n_ubatch", [16, 64, 512])
@pytest.mark.parametrize(
    ("kind", "slots"), [(kind, slots) for kind, shape in MODELS.items() for slots in slot_counts(shape)]
)
@on_fake_gpus
def test_every_combination(gpus: GpuSession, kind, slots, n_ubatch, pool, streamed):
    gpus.fakes.switch(jitter_us=100)
    assert_parity(gpus, kind, slots, n_ubatch, pool, streamed)
