"""The device look-up of decode graphs: the same logits, with the ids looked up on the device by the kernel itself."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from engine_runs.tiered_runs import SMALL, prompt_tokens
from expertier.errors import DecodeError, SourceError
from failures.failing_reads import FailingReads
from fake_ggml_gpu.device_lookups import looking_up, open_device_lookup, tiered_model
from fake_ggml_gpu.models import (
    assert_same,
    logits_in,
    logits_of,
    model_path,
    prefetched_meanwhile,
    stock_logits,
)
from fake_ggml_gpu.process import GpuSession, on_fake_gpus
from limits.waits import joined
from model_files.architecture_models import MODELS

PROMPT = prompt_tokens(20)
TOKENS = 32
KIND = "qwen3moe"
POOL_BYTES = 64 << 20
SMALL_POOL_BYTES = 2 << 20


@pytest.mark.parametrize(
    ("n_slots", "pool_bytes"),
    [
        (SMALL.top_k, POOL_BYTES),
        (SMALL.top_k, 0),
        (SMALL.top_k + 1, SMALL_POOL_BYTES),
        (SMALL.experts // 2, POOL_BYTES),
        (SMALL.experts, POOL_BYTES),
    ],
)
@pytest.mark.parametrize("kind", ["qwen3moe", "gpt-oss", pytest.param("deepseek2", marks=pytest.mark.deep)])
@on_fake_gpus
def test_logits_are_bit_identical(gpus: GpuSession, kind, n_slots, pool_bytes):
    path = model_path(gpus, kind, MODELS[kind])
    expected = stock_logits(gpus, path, PROMPT, TOKENS)
    gpus.fakes.switch(jitter_us=50, seed=n_slots)
    with looking_up(gpus, path, n_slots, pool_bytes) as model:
        for _ in range(2 if pool_bytes == POOL_BYTES else 1):  # the first run's misses are read from the file
            assert_same(logits_of(model, PROMPT, TOKENS), expected)
        counters = model.binding.counters()
    if n_slots == SMALL.experts:
        assert counters.fully_resident_calls > 0
    elif pool_bytes == POOL_BYTES:
        assert counters.device_lookups > TOKENS, counters
        assert counters.device_lookup_waits > 0, counters
    else:
        assert counters.device_lookup_fallbacks > 0, counters


@pytest.mark.parametrize(
    ("n_slots", "layers_ahead"), [(SMALL.top_k, 0), (SMALL.experts // 2, 0), (SMALL.experts // 2, 1)]
)
@on_fake_gpus
def test_prefetches_meanwhile(gpus: GpuSession, n_slots, layers_ahead):
    """Another thread's prefetches change the slots between two graphs, and the device's tables follow.

    With `layers_ahead` the device prefetches into the same slots as well.
    """
    path = model_path(gpus, KIND, MODELS[KIND])
    expected = stock_logits(gpus, path, PROMPT, TOKENS)
    with looking_up(gpus, path, n_slots, POOL_BYTES, layers_ahead=layers_ahead) as model:
        with prefetched_meanwhile(model.binding.bindings[0].manager, n_slots):
            for _ in range(3):
                assert_same(logits_of(model, PROMPT, TOKENS), expected)
        counters = model.binding.counters()
    assert counters.device_lookups > 0, counters
    assert (counters.prefetches > 0) == (layers_ahead > 0), counters


@on_fake_gpus
def test_a_lookup_that_gave_up_waiting_has_the_step_run_again(gpus: GpuSession):
    """Such a look-up goes on without the expert, so nobody may use the step's output; later look-ups do not wait."""
    path = model_path(gpus, KIND, MODELS[KIND])
    expected = stock_logits(gpus, path, PROMPT, TOKENS)
    with looking_up(gpus, path, SMALL.top_k, POOL_BYTES, spin_limit=1) as model:
        for _ in range(4):
            assert_same(logits_of(model, PROMPT, TOKENS), expected)
        gpus.fakes.take_faults()  # such as slots that are read while they are filled
        counters = model.binding.counters()
        assert counters.device_lookup_fallbacks >= counters.device_lookups_late > 0


@pytest.mark.deep
@on_fake_gpus
def test_contexts_come_and_go_while_another_decodes(gpus: GpuSession):
    """A call that frees memory waits for the device and keeps other calls out: for ever while a look-up waits."""
    path = model_path(gpus, KIND, MODELS[KIND])
    expected = stock_logits(gpus, path, PROMPT, TOKENS)
    with looking_up(gpus, path, SMALL.top_k, POOL_BYTES) as model:
        gpus.fakes.switch(one_at_a_time=1)
        failures: list[BaseException] = []
        is_over = threading.Event()

        def come_and_go() -> None:
            try:
                while not is_over.wait(0.4):  # a pause: longer than look-ups pause after a context has gone
                    with model.context(n_ctx=256, n_threads=1) as context:
                        context.decode(PROMPT[:2], 0)
            except BaseException as error:
                failures.append(error)

        other = threading.Thread(target=come_and_go, daemon=True)
        other.start()
        try:
            with model.context(n_ctx=256, n_threads=1) as context:
                for _ in range(20):
                    assert_same(logits_in(context, PROMPT, TOKENS), expected)
        finally:
            is_over.set()
            joined(other)
            gpus.fakes.switch(one_at_a_time=0)
        assert not failures, failures
        counters = model.binding.counters()
        assert counters.device_lookup_waits > 100
        assert counters.device_lookups_late == 0, (
            "the device gave up waiting: another context held the driver"
        )


@pytest.mark.parametrize("pool_bytes", [0, POOL_BYTES])
@on_fake_gpus
def test_a_failed_read_fails_the_step(gpus: GpuSession, pool_bytes):
    """A step that falls back to the host fails with its read; the next step works, and so does the look-up."""
    path = model_path(gpus, KIND, MODELS[KIND])
    expected = stock_logits(gpus, path, PROMPT, TOKENS)
    with (
        pytest.MonkeyPatch.context() as patch,
        looking_up(gpus, path, SMALL.top_k, pool_bytes) as model,
        model.context(n_ctx=512, n_threads=1) as context,
    ):
        reads, causes = FailingReads(patch), []
        for nth in (1, 3, 30, 50):
            context.forget()
            context.decode(PROMPT, 0, all_logits=True)
            rows = [context.logits(i) for i in range(len(PROMPT))]
            for position in range(len(PROMPT), len(PROMPT) + TOKENS):
                token = context.sample()
                if position == len(PROMPT) + 8:
                    reads.fail_call(nth)
                try:
                    context.decode([token], position)
                except DecodeError as error:
                    causes.append(error.__cause__)
                    context.decode([token], position)
                rows.append(context.logits())
            reads.heal()
            assert_same(np.stack(rows), expected)
        assert len(causes) == reads.failed, "a read that fails is one that a step needs"
        assert all(isinstance(cause, SourceError) for cause in causes)
        assert causes or pool_bytes


@pytest.mark.parametrize("call", ["memory", "pinned", "stream", "event"])
@on_fake_gpus
def test_a_device_that_has_nothing_for_a_lookup(gpus: GpuSession, call):
    """Opening the look-up fails with a reason, and the model runs without it."""
    path = model_path(gpus, KIND, MODELS[KIND])
    expected = stock_logits(gpus, path, PROMPT, TOKENS)
    with tiered_model(gpus, path, SMALL.top_k, POOL_BYTES, captures=False) as (model, calls):
        for nth in range(1, 20):
            live = gpus.fakes.devices[0].live()
            gpus.fakes.fail(call, nth)
            error = open_device_lookup(gpus, model.binding.bindings[0], calls)
            if gpus.fakes.is_armed(call):
                break
            assert error != ""
            assert gpus.fakes.devices[0].live() == live
        assert nth > 1
        gpus.fakes.reset()
        assert_same(logits_of(model, PROMPT, TOKENS), expected)


@on_fake_gpus
def test_two_contexts_do_without(gpus: GpuSession):
    """A waiting look-up keeps its stream busy, and its host thread keeps layers locked that the other context needs."""
    path = model_path(gpus, KIND, MODELS[KIND])
    expected = stock_logits(gpus, path, PROMPT, TOKENS)
    with looking_up(gpus, path, SMALL.top_k, POOL_BYTES) as model:
        assert_same(logits_of(model, PROMPT, TOKENS), expected)
        n_lookups = model.binding.counters().device_lookups
        with model.context(n_ctx=64, n_threads=1):
            assert_same(logits_of(model, PROMPT, TOKENS), expected)
        assert model.binding.counters().device_lookups == n_lookups > 0
        assert_same(logits_of(model, PROMPT, TOKENS), expected)
