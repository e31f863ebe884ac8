"""Contexts, sequences, models and devices at once over slots in device memory: each as if it were alone."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import numpy as np
import pytest

from engine_runs.tiered_runs import SMALL, prompt_tokens
from fake_ggml_gpu.models import (
    assert_same,
    gpu_model,
    gpu_tiers,
    logits_in,
    logits_of,
    model_path,
    prefetched_meanwhile,
    stock_logits,
)
from fake_ggml_gpu.process import GpuSession, on_fake_gpus
from limits.at_once import run_at_once
from model_files.architecture_models import MODELS

POOL_BYTES = 64 << 20
SMALL_POOL_BYTES = 3 << 20
TOKENS = 12
PROMPTS = [prompt_tokens(40), prompt_tokens(40)[::-1], prompt_tokens(60)[20:], prompt_tokens(60)[::-1][:40]]
SLOTS = [1, 3, SMALL.top_k, SMALL.experts // 2, SMALL.experts]


@pytest.mark.parametrize(
    ("n_slots", "stream_tokens"),
    [
        *((n_slots, "auto") for n_slots in SLOTS),
        (1, 0),
        (3, 0),
        (SMALL.experts // 2, 0),
        (1, 1),
        (SMALL.top_k, 1),
    ],
)
@on_fake_gpus
def test_contexts_on_threads(gpus: GpuSession, n_slots, stream_tokens):
    """Two contexts at once, twice each, over a pool that holds some of the experts."""
    path = model_path(gpus, "qwen3moe", MODELS["qwen3moe"])
    expected = [stock_logits(gpus, path, prompt, TOKENS) for prompt in PROMPTS[:2]]
    gpus.fakes.switch(jitter_us=200, seed=n_slots)
    with (
        gpu_tiers(
            gpus, path, n_slots, host_pool_bytes=SMALL_POOL_BYTES, stream_tokens=stream_tokens
        ) as tiers,
        gpu_model(gpus, tiers) as model,
    ):

        def job(i: int) -> None:
            for _ in range(2):
                assert_same(logits_of(model, PROMPTS[i], TOKENS), expected[i])

        run_at_once([lambda i=i: job(i) for i in range(2)])


@pytest.mark.parametrize("n_slots", [SMALL.top_k, SMALL.experts // 2])
@on_fake_gpus
def test_contexts_that_come_and_go(gpus: GpuSession, n_slots):
    """Work that a context has queued while it was alone may still run when another context begins."""
    path = model_path(gpus, "qwen3moe", MODELS["qwen3moe"])
    short = PROMPTS[1][:8]
    expected = stock_logits(gpus, path, PROMPTS[0], 12)
    expected_short = stock_logits(gpus, path, short, 1)
    gpus.fakes.switch(jitter_us=1000, seed=n_slots)
    with (
        gpu_tiers(gpus, path, n_slots, host_pool_bytes=POOL_BYTES, stream_tokens=8) as tiers,
        gpu_model(gpus, tiers) as model,
    ):
        ended = threading.Event()

        def stay() -> None:
            try:
                assert_same(logits_of(model, PROMPTS[0], 12), expected)
            finally:
                ended.set()

        def come_and_go() -> None:
            while not ended.is_set():
                assert_same(logits_of(model, short, 1), expected_short)

        run_at_once([stay, come_and_go])


@pytest.mark.parametrize("n_slots", [3, SMALL.experts // 2, SMALL.experts])
@on_fake_gpus
def test_prefetches_meanwhile(gpus: GpuSession, n_slots):
    path = model_path(gpus, "qwen3moe", MODELS["qwen3moe"])
    expected = stock_logits(gpus, path, PROMPTS[0], TOKENS)
    gpus.fakes.switch(jitter_us=100, seed=n_slots)
    with (
        gpu_tiers(gpus, path, n_slots, host_pool_bytes=SMALL_POOL_BYTES) as tiers,
        gpu_model(gpus, tiers) as model,
    ):
        with prefetched_meanwhile(tiers, n_slots):
            for _ in range(3):
                assert_same(logits_of(model, PROMPTS[0], TOKENS), expected)
        assert tiers.stats().prefetch.asked > 10


@pytest.mark.parametrize("n_slots", [1, SMALL.top_k, SMALL.experts])
@on_fake_gpus
def test_four_sequences_of_a_context(gpus: GpuSession, n_slots):
    path = model_path(gpus, "qwen3moe", MODELS["qwen3moe"])
    expected = [stock_logits(gpus, path, prompt, TOKENS) for prompt in PROMPTS]
    with (
        gpu_tiers(gpus, path, n_slots, host_pool_bytes=POOL_BYTES) as tiers,
        gpu_model(gpus, tiers) as model,
        model.context(n_ctx=1024, n_threads=1, n_seq_max=4) as context,
    ):
        found = [[], [], [], []]
        following = []
        for i, prompt in enumerate(PROMPTS):
            context.decode(prompt, 0, sequence=i, all_logits=True)
            found[i] += [context.logits(j) for j in range(len(prompt))]
            following.append(context.sample())
        for position in range(40, 40 + TOKENS):
            for i in range(len(PROMPTS)):
                context.decode([following[i]], position, sequence=i)
                found[i].append(context.logits())
                following[i] = context.sample()
        for rows, logits in zip(found, expected, strict=True):
            assert_same(np.stack(rows), logits)


@pytest.mark.parametrize("pool_bytes", [0, SMALL_POOL_BYTES, POOL_BYTES])
@pytest.mark.parametrize("n_slots", [2, SMALL.experts // 2])
@on_fake_gpus
def test_wide_short_wide(gpus: GpuSession, n_slots, pool_bytes):
    """Prompts of 1 to 300 tokens in turn: streamed layers, passes and slots follow one another in one context."""
    path = model_path(gpus, "gpt-oss", MODELS["gpt-oss"])
    prompts = [prompt_tokens(n) for n in (300, 1, 31, 32, 200, 5, 300)]
    expected = [stock_logits(gpus, path, prompt, 3, n_ubatch=128) for prompt in prompts]
    with (
        gpu_tiers(gpus, path, n_slots, host_pool_bytes=pool_bytes) as tiers,
        gpu_model(gpus, tiers) as model,
        model.context(n_ctx=512, n_ubatch=128, n_threads=1) as context,
    ):
        for prompt, logits in zip(prompts, expected, strict=True):
            assert_same(logits_in(context, prompt, 3), logits)


@on_fake_gpus
def test_two_devices_with_tiers_of_their_own(gpus: GpuSession):
    """A model on each, at once: slots and streamed layers in the memory of each device."""
    paths = [model_path(gpus, kind, MODELS[kind]) for kind in ("qwen3moe", "deepseek2")]
    names = ["FAKE0", "FAKE1"]
    expected = [stock_logits(gpus, path, PROMPTS[0], TOKENS) for path in paths]
    gpus.fakes.switch(jitter_us=200)
    before = [device.counters() for device in gpus.fakes.devices]
    with ExitStack() as stack:
        tiers = [
            stack.enter_context(gpu_tiers(gpus, path, 4, host_pool_bytes=SMALL_POOL_BYTES, device=name))
            for path, name in zip(paths, names, strict=True)
        ]
        models = [
            stack.enter_context(gpu_model(gpus, own, device=name))
            for own, name in zip(tiers, names, strict=True)
        ]
        for device, own in zip(gpus.fakes.devices, tiers, strict=True):
            assert device.counters()["live_bytes"] >= own.arena_bytes
        run_at_once(
            [lambda i=i: assert_same(logits_of(models[i], PROMPTS[0], TOKENS), expected[i]) for i in range(2)]
        )
    for device, old in zip(gpus.fakes.devices, before, strict=True):
        assert device.counters()["graphs"] > old["graphs"]
