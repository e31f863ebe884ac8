"""Look-ahead under the device look-up: the same logits whatever is predicted, and prefetches that are accounted for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine_runs.tiered_runs import SMALL, prompt_tokens
from expertier.engine_adapter.llama_cpp import LlamaModel, ProxyCounters
from expertier.engine_adapter.models.trace_model import trace_shape, trace_tokens, write_trace_model
from expertier.tiers.model.table import ExpertTable
from fake_ggml_gpu.device_lookups import looking_up, open_device_lookup, tiered_model
from fake_ggml_gpu.models import assert_same, gpu_tiers, logits_of, model_path, stock_logits
from fake_ggml_gpu.process import GpuSession, on_fake_gpus
from model_files.architecture_models import MODELS
from model_files.trace_models import random_ids, shape_for

PROMPT = prompt_tokens(20)
TOKENS = 32
KIND = "qwen3moe"
POOL_BYTES = 64 << 20
SMALL_POOL_BYTES = 2 << 20

LAYERS, EXPERTS, TOP_K, STEPS = 4, 16, 4, 72


def counted(counters: ProxyCounters) -> ProxyCounters:
    """Assert what holds for the counts of all runs, and return them."""
    assert counters.predicted_right <= counters.predicted
    assert counters.missing_predicted <= counters.missing <= counters.predicted
    assert counters.prefetches_in_time <= counters.prefetches_useful <= counters.prefetches
    assert counters.prefetch_wasted_bytes <= counters.prefetch_bytes
    return counters


def drifting_model(gpus: GpuSession, recall: float) -> Path:
    path = gpus.folder / f"drift-{recall}.gguf"
    if not path.exists():
        ids = random_ids(steps=STEPS, layers=LAYERS, experts=EXPERTS, top_k=TOP_K)
        shape = trace_shape(ids, replace(shape_for(ids, EXPERTS), n_embd=256, heads=4, kv_heads=2))
        write_trace_model(path, ids, shape, recall=recall)
    return path


def replay(model: LlamaModel, times: int = 1) -> None:
    """Decode the recorded steps one by one; each step's output must be the next one's token."""
    tokens = trace_tokens(STEPS)
    with model.context(n_ctx=512, n_threads=1) as context:
        for position in range(times * STEPS):
            context.decode([tokens[position % STEPS]], position)
            assert context.sample() == tokens[(position + 1) % STEPS], position


@pytest.mark.parametrize(
    ("n_slots", "pool_bytes"),
    [
        (SMALL.top_k + 1, POOL_BYTES),
        pytest.param(SMALL.experts // 2, POOL_BYTES, marks=pytest.mark.deep),
        pytest.param(SMALL.experts - 1, POOL_BYTES, marks=pytest.mark.deep),
        pytest.param(SMALL.top_k + 2, SMALL_POOL_BYTES, marks=pytest.mark.deep),
    ],
)
@pytest.mark.parametrize(
    "kind",
    [
        "qwen3moe",
        "gpt-oss",
        pytest.param("deepseek2", marks=pytest.mark.deep),
        pytest.param("glm4moe", marks=pytest.mark.deep),
        pytest.param("qwen3moe, mixed", marks=pytest.mark.deep),
    ],
)
@on_fake_gpus
def test_logits_are_bit_identical(gpus: GpuSession, kind, n_slots, pool_bytes):
    path = model_path(gpus, kind, MODELS[kind])
    expected = stock_logits(gpus, path, PROMPT, TOKENS)
    gpus.fakes.switch(jitter_us=50, seed=n_slots)
    with looking_up(gpus, path, n_slots, pool_bytes, layers_ahead=1) as model:
        for _ in range(2):
            assert_same(logits_of(model, PROMPT, TOKENS), expected)
        counters = counted(model.binding.counters())
    if pool_bytes == POOL_BYTES:
        assert counters.predicted > 0
    if pool_bytes == POOL_BYTES and n_slots <= SMALL.experts // 2:  # with more of them little is missing
        assert counters.prefetches_useful > 0


@pytest.mark.parametrize("n_tokens", [2, pytest.param(8, marks=pytest.mark.deep)])
@on_fake_gpus
def test_batches_of_a_few_tokens(gpus: GpuSession, n_tokens):
    path = model_path(gpus, KIND, MODELS[KIND])
    tokens = prompt_tokens(12 * n_tokens)

    def logits(model: LlamaModel) -> np.ndarray:
        rows = []
        with model.context(n_ctx=512, n_threads=1) as context:
            for first in range(0, len(tokens), n_tokens):
                context.decode(tokens[first : first + n_tokens], first, all_logits=True)
                rows += [context.logits(i) for i in range(n_tokens)]
        return np.stack(rows)

    with LlamaModel.open(gpus.engine, path, repack=False, inner_device="FAKE0") as stock:
        expected = logits(stock)
    with looking_up(gpus, path, 12, POOL_BYTES, layers_ahead=1) as model:
        for _ in range(3):
            assert_same(logits(model), expected)
        counters = counted(model.binding.counters())
    if n_tokens == 2:
        assert counters.prefetches > 0, "more than 12 experts are rarely asked for"
    assert n_tokens == 8 or counters.predicted > 0


@pytest.mark.parametrize(
    ("recall", "ahead"),
    [
        (0.75, 1),
        *(pytest.param(*case, marks=pytest.mark.deep) for case in ((0.0, 2), (1.0, 1), (1.0, 2), (0.75, 4))),
    ],
)
@on_fake_gpus
def test_counters_tell_the_share_that_was_foretold(gpus: GpuSession, recall, ahead):
    path = drifting_model(gpus, recall)
    with looking_up(gpus, path, EXPERTS // 2, POOL_BYTES, layers_ahead=ahead) as model:
        replay(model, 2)
        counters = counted(model.binding.counters())
        tiers = model.binding.bindings[0].manager
        assert tiers.stats().l1.hits > 0
    assert counters.predicted > STEPS * (LAYERS - 1) * TOP_K // 2
    n_graphs = counters.device_lookups / LAYERS
    assert counters.predicted > 0.9 * n_graphs * (LAYERS - 1) * TOP_K, "every layer but the first is foretold"
    found = counters.predicted_right / counters.predicted
    if recall == 0.75:
        assert 0.7 < found < 0.85
        assert 0 < counters.prefetches_useful < counters.prefetches
    elif recall == 1.0:
        assert found == 1, counters
        unended = counters.prefetches - counters.prefetches_useful  # prefetches of runs that fell back
        assert 0 <= unended <= 2 * counters.device_lookup_fallbacks < counters.prefetches, counters
    else:
        assert found == 0
        assert counters.prefetches_useful == 0 < counters.prefetches
        assert counters.prefetch_wasted_bytes == counters.prefetch_bytes > 0
    assert counters.prefetch_pauses == 0, "it was to go on whatever comes of it"


@pytest.mark.deep
@on_fake_gpus
def test_what_does_not_pay_pauses(gpus: GpuSession):
    found = {}
    for recall in (0.0, 1.0):
        path = drifting_model(gpus, recall)
        with looking_up(gpus, path, EXPERTS // 2, POOL_BYTES, layers_ahead=1, may_pause=True) as model:
            replay(model, 3)
            found[recall] = counted(model.binding.counters())
    assert found[0.0].prefetch_pauses > 0
    assert found[0.0].predicted < found[1.0].predicted
    assert found[1.0].prefetch_pauses == 0


@on_fake_gpus
def test_layers_that_hardly_miss_are_not_foretold(gpus: GpuSession):
    """A new graph settles which layers these are, once enough graphs have run."""
    path = model_path(gpus, KIND, MODELS[KIND])
    expected = stock_logits(gpus, path, PROMPT, TOKENS)
    predicted = []
    with looking_up(gpus, path, SMALL.experts - 2, POOL_BYTES, layers_ahead=1) as model:
        for _ in range(3):
            assert_same(logits_of(model, PROMPT, TOKENS), expected)
            predicted.append(model.binding.counters().predicted)
    assert 0 < predicted[0] < predicted[1] == predicted[2]


@on_fake_gpus
def test_matrices_of_several_pieces(gpus: GpuSession):
    """A matrix above 1 MiB goes in pieces, each from its place in the host's copy to its place in the slot.

    Pieces that have not arrived when their expert is asked for are copied at once, and the look-up waits for them.
    """
    shape = replace(
        MODELS[KIND], experts=8, top_k=2, n_embd=512, n_ff=520, gate_up_type="F32", down_type="F32"
    )
    path = model_path(gpus, "large matrices", shape)
    assert 1 << 20 < ExpertTable.from_gguf(path).layers[0].matrices[0].expert_bytes < 2 << 20
    expected = stock_logits(gpus, path, PROMPT, TOKENS)
    gpus.fakes.switch(jitter_us=300)
    with looking_up(gpus, path, 4, POOL_BYTES, layers_ahead=1) as model:
        fallbacks = []
        for _ in range(2):
            assert_same(logits_of(model, PROMPT, TOKENS), expected)
            counters = counted(model.binding.counters())
            fallbacks.append(counters.device_lookup_fallbacks)
        assert counters.prefetches_in_time < counters.prefetches_useful
        assert fallbacks[0] == fallbacks[1], "all that the second run misses is in the pool"


@pytest.mark.parametrize("call", ["memory", "pinned", "event"])
@on_fake_gpus
def test_a_device_that_has_nothing_for_predictions(gpus: GpuSession, call):
    """Either there is no device look-up and all is given back, or it works and says why it predicts nothing."""
    path = model_path(gpus, KIND, MODELS[KIND])
    expected = stock_logits(gpus, path, PROMPT, TOKENS)
    with gpu_tiers(gpus, path, SMALL.experts // 2, host_pool_bytes=POOL_BYTES):
        pass  # its file is in the page cache
    without = 0
    for nth in range(1, 20):
        with tiered_model(gpus, path, SMALL.experts // 2, POOL_BYTES, layers_ahead=1) as (
            model,
            calls,
        ):
            gpus.fakes.fail(call, nth)
            error = open_device_lookup(gpus, model.binding.bindings[0], calls)
            if gpus.fakes.is_armed(call):
                assert error == ""
                break
            assert error != ""
            if error.startswith("prefetch\t"):
                without += 1
                assert_same(logits_of(model, PROMPT, TOKENS), expected)
                assert model.binding.counters().predicted == 0
    gpus.fakes.reset()
    assert without > 0, "no call fails that only predictions make"
