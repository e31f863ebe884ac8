"""The engine's compute buffers in the slab: the same logits, whatever moves, and no byte of an expert is lost."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import pytest

from engine_runs.tiered_runs import SMALL, assert_nothing_held, prompt_tokens
from expertier.engine_adapter.llama_cpp import LlamaContext, LlamaModel
from expertier.errors import BusyError, DecodeError, DeviceError
from expertier.units import MIB
from fake_ggml_gpu.computing import (
    FailingMoves,
    assert_sound,
    computing_model,
    counts_of,
    opened_device_lookup,
)
from fake_ggml_gpu.ggml import Ggml
from fake_ggml_gpu.models import Logits, assert_same, logits_in, logits_of, model_path, stock_logits
from fake_ggml_gpu.process import GpuSession, on_fake_gpus
from limits.at_once import run_at_once
from model_files.architecture_models import MODELS

KIND = "gpt-oss"
N_UBATCH = 128
TOKENS = 10
SIZES = (300, 1, 31, 200, 5, 300)
N_WARM = 4  # graphs before the device look-up, as in lookup/run.cpp
NEVER = 1 << 60  # missed bytes that make a move down pay


def failure_of(context: LlamaContext, prompt: list[int], expected: Logits) -> DecodeError | None:
    """The error of the prompt's batch; None where there was none, and the logits were the expected ones."""
    try:
        assert_same(logits_in(context, prompt, TOKENS), expected)
    except DecodeError as error:
        return error
    return None


@pytest.mark.parametrize(
    ("kind", "n_slots", "with_device_lookup"),
    [
        (KIND, 2, False),
        (KIND, SMALL.top_k, True),
        (KIND, 5, True),
        ("deepseek2", 6, False),
        pytest.param(KIND, 8, False, marks=pytest.mark.deep),
        pytest.param("deepseek2", 6, True, marks=pytest.mark.deep),
        pytest.param("qwen3moe, mixed", 5, False, marks=pytest.mark.deep),
        pytest.param("qwen3moe, mixed", 5, True, marks=pytest.mark.deep),
    ],
)
@on_fake_gpus
def test_wide_short_wide(gpus: GpuSession, kind, n_slots, with_device_lookup):
    """Prompts of 1 to 300 tokens in turn: the boundary goes up and down, and every step computes what stock does."""
    path = model_path(gpus, kind, MODELS[kind])
    prompts = [prompt_tokens(n) for n in SIZES]
    expected = [stock_logits(gpus, path, prompt, TOKENS, n_ubatch=N_UBATCH) for prompt in prompts]
    gpus.fakes.switch(jitter_us=50, seed=n_slots)
    with (
        computing_model(gpus, path, n_slots, compute_bytes=5 * MIB // 2) as model,  # never all slots
        ExitStack() as stack,
    ):
        if with_device_lookup:
            stack.enter_context(opened_device_lookup(gpus, model))
        with model.context(n_ctx=512, n_ubatch=N_UBATCH, n_threads=1) as context:
            for prompt, logits in [*zip(prompts, expected, strict=True)] * (1 + with_device_lookup):
                assert_same(logits_in(context, prompt, TOKENS), logits)
                assert_sound(model)
            assert counts_of(model).buffers == 1
        counts, counters = counts_of(model), model.binding.counters()
    assert counts.moves_down > 0
    assert counts.moves_up > 0
    assert counts.failed_moves == counts.buffers == 0
    assert counts.copies >= counts.moves_up  # at least its zeros
    assert counts.queue_ns > 0
    assert counts.wait_ns > 0
    assert counts.queue_ns + counts.wait_ns < counts.move_ns, "the rest is Python's"
    if with_device_lookup and n_slots >= SMALL.top_k and kind == KIND:
        assert counters.device_lookups > 0


def let_move(model: LlamaModel, n_bytes: int) -> None:
    """Set from how many missed bytes on a move down pays, beside the bytes that it gives room to."""
    model.binding.bindings[0]._compute._struct.move_cost_bytes = n_bytes


@pytest.mark.parametrize("captures", [True, False])
@on_fake_gpus
def test_tables_on_the_device_follow(gpus: GpuSession, captures):
    """Between two graphs with device look-ups no expert comes or goes, but all slots get other numbers."""
    path = model_path(gpus, KIND, MODELS[KIND])
    prompt = prompt_tokens(2)[1:]
    expected = stock_logits(gpus, path, prompt, 0)
    with (
        computing_model(gpus, path, 6, compute_bytes=MIB, move_cost_bytes=NEVER) as model,
        opened_device_lookup(gpus, model, captures=captures),
        model.context(n_ctx=256, n_ubatch=64, n_threads=1) as context,
    ):
        slots = model.binding.bindings[0].manager.slots

        def decode_until_looked_up(n_warm: int) -> None:
            n_lookups = model.binding.counters().device_lookups
            for _ in range(n_warm):
                assert_same(logits_in(context, prompt, 0), expected)
            assert model.binding.counters().device_lookups == n_lookups, (
                "kernels or graphs have to be made first"
            )
            for _ in range(4):
                assert_same(logits_in(context, prompt, 0), expected)
            assert model.binding.counters().device_lookups > n_lookups

        decode_until_looked_up(1 if captures else N_WARM)
        misses = model.binding.bindings[0].manager.stats().l1.misses
        let_move(model, -NEVER)
        decode_until_looked_up(
            0 if captures else N_WARM
        )  # it is captured anew, and needs none of CUDA's own graphs
        assert counts_of(model).moves_down == 1
        assert slots < model.binding.bindings[0].manager.slots < (SMALL.experts,) * len(slots)
        assert model.binding.bindings[0].manager.stats().l1.misses == misses


@on_fake_gpus
def test_layers_become_whole(gpus: GpuSession):
    """While batches are short, each expert has a slot and ids are slot ids; in a wide batch neither is so."""
    path = model_path(gpus, KIND, MODELS[KIND])
    wide, short = prompt_tokens(300), prompt_tokens(3)
    wides = stock_logits(gpus, path, wide, TOKENS, n_ubatch=N_UBATCH)
    shorts = stock_logits(gpus, path, short, TOKENS, n_ubatch=N_UBATCH)
    with (
        computing_model(gpus, path, 9) as model,
        model.context(n_ctx=512, n_ubatch=N_UBATCH, n_threads=1) as context,
    ):
        tiers = model.binding.bindings[0].manager
        for _ in range(3):
            assert_same(logits_in(context, wide, TOKENS), wides)
            let_move(model, -NEVER)
            assert_same(logits_in(context, short, TOKENS), shorts)
            let_move(model, 0)
            assert set(tiers.slots) == {SMALL.experts}
            tiers.drain()
            before = model.binding.counters()
            assert_same(logits_in(context, short, TOKENS), shorts)
            after = model.binding.counters()
            assert after.fully_resident_calls > before.fully_resident_calls
            assert after.id_reads == before.id_reads
        assert counts_of(model).moves_up == 2


@on_fake_gpus
def test_layers_become_whole_without_misses(gpus: GpuSession):
    """Where next to nothing is missed, the look-ups alone make it pay to give a layer a slot for every expert."""
    path = model_path(gpus, KIND, MODELS[KIND])
    prompt = prompt_tokens(2)[1:]
    expected = stock_logits(gpus, path, prompt, 0)
    with (
        computing_model(gpus, path, SMALL.experts - 1) as model,
        model.context(n_ctx=512, n_ubatch=N_UBATCH, n_threads=1) as context,
    ):
        for _ in range(20):
            assert_same(logits_in(context, prompt, 0), expected)
        assert counts_of(model).moves_down == 1
        assert set(model.binding.bindings[0].manager.slots) == {SMALL.experts}
        assert model.binding.bindings[0].manager.stats().l1.misses <= SMALL.top_k * len(
            model.binding.bindings[0].manager.slots
        )


@on_fake_gpus
def test_inputs_wait_for_the_slots(gpus: GpuSession):
    """The inputs of a wide batch need more room than all buffers of a short one, and would lie where slots are."""
    path = model_path(gpus, "eight layers", replace(SMALL, layers=8))
    wide, short = prompt_tokens(500), prompt_tokens(8)
    wides = stock_logits(gpus, path, wide, 4)
    shorts = stock_logits(gpus, path, short, 8)
    with (
        computing_model(gpus, path, 4, compute_bytes=10 * MIB, move_cost_bytes=-NEVER) as model,
        model.context(n_ctx=512, n_ubatch=512, n_threads=1) as context,
    ):
        for _ in range(3):
            assert_same(logits_in(context, short, 8), shorts)
            assert_sound(model)
            layout = model.binding.bindings[0].manager._slab.layout
            assert layout.rounding_bytes < layout.layouts[0].slot_bytes, "no room is left between the two"
            assert_same(logits_in(context, wide, 4), wides)
            assert_sound(model)
        assert counts_of(model).moves_up > 1


@on_fake_gpus
def test_a_boundary_that_stays(gpus: GpuSession):
    """Where misses cost less than a move, decode computes below slots that it could have had."""
    path = model_path(gpus, KIND, MODELS[KIND])
    expected = stock_logits(gpus, path, prompt_tokens(300), TOKENS, n_ubatch=N_UBATCH)
    with computing_model(gpus, path, 8, move_cost_bytes=NEVER) as model:
        for _ in range(2):
            assert_same(logits_of(model, prompt_tokens(300), TOKENS, n_ubatch=N_UBATCH), expected)
        counts = counts_of(model)
        assert (counts.moves_up, counts.moves_down) == (0, 0)
        assert set(model.binding.bindings[0].manager.slots) == {8}


@on_fake_gpus
def test_more_than_was_set_aside(gpus: GpuSession):
    """A graph wider than planned takes room from slots; one that leaves a layer without slots is allocated apart."""
    path = model_path(gpus, KIND, MODELS[KIND])
    device = gpus.fakes.devices[0]
    expected = stock_logits(gpus, path, prompt_tokens(300), TOKENS)
    narrower = stock_logits(gpus, path, prompt_tokens(300), TOKENS, n_ubatch=64)
    with computing_model(gpus, path, 16, compute_bytes=MIB // 2) as model:
        assert_same(logits_of(model, prompt_tokens(300), TOKENS, n_ubatch=64), narrower)
        counts = counts_of(model)
        assert counts.moves_up > 0, counts
    with computing_model(gpus, path, 2, compute_bytes=MIB // 2) as model:
        before = device.counters()["allocations"]
        assert_same(logits_of(model, prompt_tokens(300), TOKENS), expected)
        assert counts_of(model).moves_up == 0
        assert device.counters()["allocations"] > before


@pytest.mark.parametrize("n_slots", [2, SMALL.experts // 2])
@on_fake_gpus
def test_contexts_at_once(gpus: GpuSession, n_slots):
    """Two contexts at the same time, each with wide and short batches in turn."""
    path = model_path(gpus, KIND, MODELS[KIND])
    prompts = [prompt_tokens(200), prompt_tokens(60)[::-1]]
    expected = [stock_logits(gpus, path, prompt, TOKENS, n_ubatch=N_UBATCH) for prompt in prompts]
    gpus.fakes.switch(jitter_us=100, seed=n_slots)
    with computing_model(gpus, path, n_slots, host_pool_bytes=3 * MIB) as model:

        def work(i: int) -> None:
            for _ in range(3):
                assert_same(logits_of(model, prompts[i], TOKENS, n_ubatch=N_UBATCH), expected[i])

        run_at_once([partial(work, i) for i in range(2)])
        counts = counts_of(model)
        assert counts.moves_up + counts.moves_down > 0


@on_fake_gpus
def test_buffers_lie_side_by_side(gpus: GpuSession):
    path = model_path(gpus, KIND, MODELS[KIND])
    prompt = prompt_tokens(200)
    expected = stock_logits(gpus, path, prompt, TOKENS, n_ubatch=N_UBATCH)
    with computing_model(gpus, path, 8) as model:
        contexts = [model.context(n_ctx=512, n_ubatch=N_UBATCH, n_threads=1) for _ in range(2)]
        both = counts_of(model)
        assert both.buffers == 2
        for context in (
            *contexts,
            contexts[0],
        ):  # the second one's need keeps the boundary above the first one's
            assert_same(logits_in(context, prompt, TOKENS), expected)
            assert_sound(model)
        needed_bytes = counts_of(model).needed_bytes
        contexts.pop(0).close()
        one = counts_of(model)
        assert (one.buffers, one.buffer_bytes) == (1, both.buffer_bytes // 2)
        contexts.append(model.context(n_ctx=512, n_ubatch=N_UBATCH, n_threads=1))
        assert counts_of(model).buffer_bytes == both.buffer_bytes  # it got the first one's place
        for context in contexts:
            assert_same(logits_in(context, prompt, TOKENS), expected)
        with pytest.raises(BusyError, match="compute buffers"):
            model.binding.close()
        for context in contexts:
            context.close()
    assert needed_bytes > both.buffer_bytes // 2, "the second one begins behind the first one"


@on_fake_gpus
def test_what_is_no_compute_buffer_lies_elsewhere(gpus: GpuSession):
    """Buffers of weights, and buffers that nobody has marked as compute buffers when their address is asked for."""
    path = model_path(gpus, KIND, MODELS[KIND])
    with computing_model(gpus, path, 8) as model, Ggml(gpus.engine) as ggml:
        tiers = model.binding.bindings[0].manager
        inner = ggml.dev_buffer_type(ggml.device("FAKE0"))
        wrapper = ggml.dev_buffer_type(ggml.device("TIER_FAKE0"))
        assert wrapper != inner
        ggml.vectors("TIER_FAKE0", 3, 1000)
        assert counts_of(model).buffers == 0
        buffer = ggml.buft_alloc_buffer(wrapper, 4096)
        assert counts_of(model).buffers == 1
        base = ggml.buffer_get_base(buffer)
        assert not tiers._slab.base <= base < tiers._slab.base + tiers._slab.n_bytes
        assert counts_of(model).buffers == 0
        assert ggml.buffer_get_type(buffer) == inner
        ggml.buffer_free(buffer)
    with Ggml(gpus.engine) as ggml:
        assert ggml.dev_buffer_type(ggml.device("TIER_FAKE0")) == inner, (
            "without tiers there is nothing to wrap"
        )


@pytest.mark.parametrize("direction", ["up", "down"])
@on_fake_gpus
def test_a_move_that_fails(gpus: GpuSession, direction):
    """Whichever of its calls fails: a move up fails the batch, a move down does not, and the next batch works."""
    path = model_path(gpus, KIND, MODELS[KIND])
    wide, short = prompt_tokens(300), prompt_tokens(3)
    wides = stock_logits(gpus, path, wide, TOKENS, n_ubatch=N_UBATCH)
    shorts = stock_logits(gpus, path, short, 3, n_ubatch=N_UBATCH)
    with (
        pytest.MonkeyPatch.context() as patch,
        computing_model(gpus, path, 4) as model,
        model.context(n_ctx=512, n_ubatch=N_UBATCH, n_threads=1) as context,
    ):
        moves = FailingMoves(patch)
        n_failed = 0
        for nth in (*range(1, 6), *range(6, 300, 24)):
            let_move(model, -NEVER)
            assert_same(logits_in(context, short, 3), shorts)
            let_move(model, NEVER)
            if direction == "down":
                assert_same(logits_in(context, wide, TOKENS), wides)
            moved_before = counts_of(model)
            moves.fail_call(nth)
            if direction == "down":
                let_move(model, -NEVER)
                assert_same(logits_in(context, short, 3), shorts)
            else:
                error = failure_of(context, wide, wides)
                assert (error is None) == moves.is_armed
                if error is not None:
                    assert "make room" in str(error)
                    assert isinstance(error.__cause__, DeviceError)
            assert_sound(model)
            assert_nothing_held(model.binding.bindings[0].manager)
            counts = counts_of(model)
            if moves.is_armed:
                assert counts.moves_up + counts.moves_down > moved_before.moves_up + moved_before.moves_down
                break
            n_failed += 1
            assert counts.failed_moves == n_failed
            assert_same(logits_in(context, wide, TOKENS), wides)
        assert n_failed > 1, "how many calls a move makes depends on which slots the batches before it filled"
        assert moves.is_armed


@on_fake_gpus
def test_while_python_cannot_answer(gpus: GpuSession):
    """A move needs Python: where that is refused, the batch fails, and the next one works."""
    path = model_path(gpus, KIND, MODELS[KIND])
    expected = stock_logits(gpus, path, prompt_tokens(300), TOKENS, n_ubatch=64)
    with (
        computing_model(gpus, path, 16, compute_bytes=MIB // 2) as model,
        model.context(n_ctx=512, n_ubatch=64, n_threads=1) as context,
    ):
        model.binding.refuse_misses()
        with pytest.raises(DecodeError, match="while the engine starts or ends"):
            context.decode(prompt_tokens(300), 0)
        model.binding.serve_misses()
        assert_same(logits_in(context, prompt_tokens(300), TOKENS), expected)
