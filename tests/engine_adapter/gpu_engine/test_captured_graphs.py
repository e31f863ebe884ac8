"""Decode graphs that are captured with their look-ups and launched at once; where that fails, queued in parts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engine_runs.tiered_runs import SMALL, prompt_tokens
from expertier.engine_adapter.llama_cpp import LlamaModel
from fake_ggml_gpu.device_lookups import looking_up, open_device_lookup, tiered_model
from fake_ggml_gpu.models import DEVICE, assert_same, logits_of, model_path, stock_logits
from fake_ggml_gpu.process import GpuSession, on_fake_gpus
from model_files.architecture_models import MODELS

PROMPT = prompt_tokens(20)
TOKENS = 32
KIND = "qwen3moe"
POOL_BYTES = 64 << 20


@pytest.mark.parametrize(
    ("layers_ahead", "n_slots"),
    [
        (0, SMALL.experts // 2),
        (2, SMALL.top_k),
        pytest.param(0, SMALL.top_k, marks=pytest.mark.deep),
        pytest.param(2, SMALL.experts // 2, marks=pytest.mark.deep),
    ],
)
@on_fake_gpus
def test_a_graph_is_captured_once_and_launched_for_each_token(gpus: GpuSession, layers_ahead, n_slots):
    path = model_path(gpus, KIND, MODELS[KIND])
    expected = stock_logits(gpus, path, PROMPT, TOKENS)
    gpus.fakes.switch(jitter_us=50, seed=n_slots)
    with looking_up(gpus, path, n_slots, POOL_BYTES, layers_ahead=layers_ahead) as model:
        launches = launched(gpus)
        for _ in range(3):
            assert_same(logits_of(model, PROMPT, TOKENS), expected)
        counters = model.binding.counters()
    assert counters.captured_runs > TOKENS, counters
    assert counters.captured_runs == launched(gpus) - launches
    assert 0 < counters.captures < counters.captured_runs / 4, counters
    assert (
        0
        < counters.device_lookup_waits
        <= counters.device_lookups
        <= MODELS[KIND].layers * counters.captured_runs
    ), counters
    assert (counters.prefetches > 0) == (layers_ahead > 0 and n_slots > SMALL.top_k), counters


@on_fake_gpus
def test_without_captures_graphs_are_queued_part_by_part(gpus: GpuSession):
    path = model_path(gpus, KIND, MODELS[KIND])
    expected = stock_logits(gpus, path, PROMPT, TOKENS)
    gpus.fakes.switch(jitter_us=50, seed=1)
    with looking_up(gpus, path, SMALL.experts // 2, POOL_BYTES, layers_ahead=1, captures=False) as model:
        for _ in range(3):
            assert_same(logits_of(model, PROMPT, TOKENS), expected)
        counters = model.binding.counters()
    assert counters.captured_runs == counters.captures == 0
    assert counters.device_lookups > TOKENS, counters
    assert counters.prefetches > 0, counters


@pytest.mark.parametrize("call", ["capture", "instantiate"])
@on_fake_gpus
def test_where_a_capture_fails_the_context_does_without(gpus: GpuSession, call):
    """A capture fails in the trial at the start, which says so, or later; either way everything is given back."""
    path = model_path(gpus, KIND, MODELS[KIND])
    expected = stock_logits(gpus, path, PROMPT, TOKENS)
    for nth in (1, 2):
        with tiered_model(gpus, path, SMALL.experts // 2, POOL_BYTES, layers_ahead=1) as (model, calls):
            gpus.fakes.fail(call, nth)
            error = open_device_lookup(gpus, model.binding.bindings[0], calls)
            assert error.startswith("capture\t") if nth == 1 else error == "", error
            for _ in range(2):
                assert_same(logits_of(model, PROMPT, TOKENS), expected)
            assert not gpus.fakes.is_armed(call)
            counters = model.binding.counters()
            assert counters.device_lookups > TOKENS, counters
            # Where one context could not capture a graph, the next context tries again.
            assert (counters.captured_runs == 0) == (nth == 1), counters
        gpus.fakes.reset()
    assert "live_graphs" not in gpus.fakes.devices[0].live()


@on_fake_gpus
def test_graphs_of_several_widths_are_captured_each(gpus: GpuSession):
    """One context runs them in turn, as with a draft and its verification: no graph is launched in place of another."""
    path = model_path(gpus, KIND, MODELS[KIND])
    widths = [1] * 4 + [2] * 4 + [1] * 4
    tokens = prompt_tokens(sum(widths))

    def logits(model: LlamaModel) -> np.ndarray:
        rows, position = [], 0
        with model.context(n_ctx=256, n_threads=1) as context:
            for width in widths:
                context.decode(tokens[position : position + width], position, all_logits=True)
                rows += [context.logits(i) for i in range(width)]
                position += width
        return np.stack(rows)

    with LlamaModel.open(gpus.engine, path, repack=False, inner_device=DEVICE) as stock:
        expected = logits(stock)
    with looking_up(gpus, path, 2 * SMALL.top_k, POOL_BYTES) as model:
        for _ in range(2):
            assert_same(logits(model), expected)
        assert model.binding.counters().captures > 2


@pytest.mark.parametrize("n_tokens", [4, 5])
@on_fake_gpus
def test_larger_batches_are_not_captured(gpus: GpuSession, n_tokens):
    """CUDA's backend waits for the device in some of these batches; in a capture such a wait ends the process."""
    path = model_path(gpus, "many small experts", replace(MODELS[KIND], experts=32, top_k=2))
    with looking_up(gpus, path, 31, POOL_BYTES) as model:
        with model.context(n_ctx=512, n_threads=1) as context:
            for position in range(0, 20 * n_tokens, n_tokens):
                context.decode(PROMPT[:n_tokens], position, all_logits=True)
                assert np.isfinite(context.logits(n_tokens - 1)).all()
        counters = model.binding.counters()
    assert counters.device_lookups > 0, counters
    assert (counters.captured_runs > 0) == (n_tokens == 4), counters


@on_fake_gpus
def test_experts_that_are_not_quantised_are_not_captured(gpus: GpuSession):
    """CUDA's backend waits for the device in such batches too."""
    path = model_path(gpus, "half floats", replace(MODELS[KIND], gate_up_type="F16", down_type="F16"))
    expected = stock_logits(gpus, path, PROMPT, TOKENS)
    with looking_up(gpus, path, SMALL.experts // 2, POOL_BYTES) as model:
        for _ in range(2):
            assert_same(logits_of(model, PROMPT, TOKENS), expected)
        counters = model.binding.counters()
    assert counters.device_lookups > 0, counters
    assert counters.captured_runs == 0, counters


def launched(gpus: GpuSession) -> int:
    return gpus.fakes.devices[0].counters()["graph_launches"]
