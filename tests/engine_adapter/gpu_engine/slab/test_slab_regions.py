"""Random contexts and batches over one slab: nobody computes where slots are; the ledger says what is taken."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine_runs.tiered_runs import prompt_tokens
from expertier.engine_adapter.llama_cpp import LlamaContext, LlamaModel
from expertier.engine_adapter.tiered_model import TieredModel
from expertier.planner.budget.context_memory import ContextShape
from expertier.planner.budget.ledger import Consumer
from expertier.tiers.config.config import TierConfig
from expertier.tiers.model.table import ExpertTable
from expertier.units import KIB, MIB
from fake_ggml_gpu.computing import assert_sound, computing_model, counts_of
from fake_ggml_gpu.models import DEVICE, assert_same, logits_of, model_path, stock_logits
from fake_ggml_gpu.process import GpuSession, on_fake_gpus
from model_files.architecture_models import MODELS

KIND = "qwen3moe"
UBATCHES = (16, 64, 128)

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("open"), st.sampled_from(UBATCHES)),
        st.tuples(st.just("close"), st.integers(0, 3)),
        st.tuples(st.just("decode"), st.tuples(st.integers(0, 3), st.sampled_from((1, 2, 8, 40, 150)))),
    ),
    min_size=4,
    max_size=14,
)


def _step(model: LlamaModel, contexts: list[LlamaContext], what: str, how: object) -> None:
    """Do one step; those that name a context that is not there do nothing."""
    if what == "open" and len(contexts) < 3:
        contexts.append(model.context(n_ctx=256, n_ubatch=how, n_threads=1))
    elif what == "close" and how < len(contexts):
        contexts.pop(how).close()
    elif what == "decode" and how[0] < len(contexts):
        context, tokens = contexts[how[0]], prompt_tokens(how[1])
        context.forget()
        context.decode(tokens, 0)
        assert np.isfinite(context.logits()).all()


def _run(gpus: GpuSession, n_slots: int, steps: list[tuple[str, object]]) -> None:
    path = model_path(gpus, KIND, MODELS[KIND])
    with computing_model(gpus, path, n_slots, host_pool_bytes=3 * MIB) as model, ExitStack() as stack:
        contexts: list[LlamaContext] = []
        stack.callback(lambda: [context.close() for context in contexts])
        for what, how in steps:
            _step(model, contexts, what, how)
            counts = counts_of(model)
            assert counts.buffers <= len(contexts)  # one without a place is allocated apart
            assert counts.buffer_bytes <= model.binding.bindings[0].manager.engine.most_compute_bytes
            assert_sound(model)


@pytest.mark.parametrize("n_slots", [3, 8])
@on_fake_gpus
def test_random_contexts_and_batches(gpus: GpuSession, n_slots):
    @settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(STEPS)
    def check(steps):
        _run(gpus, n_slots, steps)

    check()


@pytest.mark.deep
@pytest.mark.parametrize("n_slots", [2, 5, 11])
@on_fake_gpus
def test_many_random_contexts_and_batches(gpus: GpuSession, n_slots):
    gpus.fakes.switch(jitter_us=100, seed=n_slots)

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(STEPS)
    def check(steps):
        _run(gpus, n_slots, steps)

    check()


@pytest.mark.parametrize("kind", ["qwen3moe", "gpt-oss", "deepseek2"])
@on_fake_gpus
def test_the_ledger_says_what_is_taken(gpus: GpuSession, kind):
    """`auto` on a small device: the slab is arena and compute, and nothing is computed in beside it."""
    path = model_path(gpus, kind, MODELS[kind])
    table, device = ExpertTable.from_gguf(path), gpus.fakes.devices[0]
    prompt, shape = prompt_tokens(200), ContextShape(n_ctx=512, n_ubatch=128, full_windows=True)
    config = TierConfig(engine_device=DEVICE, headroom_bytes=64 * KIB, slab_compute=True)
    expected = stock_logits(gpus, path, prompt, 8, n_ubatch=128)
    device.set_memory(16 * MIB)
    try:
        with TieredModel.open(gpus.engine, table, config, shape=shape) as opened:
            (tiers,) = opened.tiers.managers
            ledger = tiers.ledger
            assert ledger is not None
            slab = ledger.slab_bytes
            assert tiers.engine.compute_bytes == pytest.approx(
                ledger.entries[Consumer.COMPUTE_NARROW] + ledger.entries[Consumer.COMPUTE_WIDE], abs=128
            )
            assert tiers._slab.n_bytes == pytest.approx(slab, abs=256)
            before = device.counters()["live_bytes"]
            beside = ledger.entries[Consumer.WEIGHTS] + ledger.entries[Consumer.PREFILL_STREAM]
            assert before == pytest.approx(slab + beside, abs=MIB // 4)  # pages, a buffer each
            with opened.model.context(n_ctx=512, n_ubatch=128, n_threads=1) as context:
                taken = device.counters()["live_bytes"] - before
                assert taken == pytest.approx(ledger.entries[Consumer.KV], abs=MIB // 16)
                assert 0 < counts_of(opened.model).buffer_bytes <= tiers.engine.compute_bytes
                context.decode(prompt[:128], 0)
                assert counts_of(opened.model).moves_up == 0  # what was set aside is enough
            assert_same(logits_of(opened.model, prompt, 8, n_ubatch=128), expected)
            assert_sound(opened.model)
    finally:
        device.set_memory(1 << 30)
