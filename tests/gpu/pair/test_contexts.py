"""A draft model, two contexts, four sequences: on one device and on two of a real llama.cpp, all as stock has them."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from engine_runs.tiered_runs import SMALL, prompt_tokens
from expertier.engine_adapter.llama_cpp import LlamaContext, LlamaModel
from expertier.engine_adapter.llama_cpp.generation import generate
from fake_ggml_gpu.models import Logits, assert_same, logits_of, model_path
from limits.at_once import run_at_once
from real_devices.models import (
    EVERY_SPLIT,
    KINDS,
    N_CTX,
    SHAPE,
    Split,
    stock_logits,
    stock_model,
    tiered,
    write_kind,
)
from real_devices.process import DeviceSession, on_devices
from real_devices.speculation import Speculation, speculate

KIND = "qwen3moe"
POOL = 64 << 20
TOKENS = 16
SEVERAL = [SMALL.top_k + 2, SMALL.experts // 2, SMALL.experts]
DRAFTED = 24


@pytest.mark.parametrize("n_slots", [SMALL.top_k, SMALL.experts // 2])
@pytest.mark.parametrize("split", EVERY_SPLIT)
@on_devices
def test_a_draft_model_speculates(session: DeviceSession, split, n_slots):
    """Greedily, with tiers of its own beside the main model's: the tokens of the main model alone, stock's logits."""
    main = write_kind(session, KIND)
    draft = model_path(session, "pair draft", replace(KINDS[KIND], top_k=KINDS[KIND].top_k - 1))
    with stock_model(session, main, split) as model, stock_model(session, draft, split) as of_draft:
        prompt, alone, expected = exact_speculation(model, of_draft)
    with (
        tiered(session, main, split, n_slots, host_pool_bytes=POOL) as tiered_main,
        tiered(session, draft, split, n_slots, host_pool_bytes=POOL) as tiered_draft,
    ):
        with tiered_main.model.context(n_ctx=N_CTX, n_threads=1) as context:
            assert generate(context, prompt, DRAFTED).tokens == alone
        for _ in range(2):
            found = speculated(tiered_main.model, tiered_draft.model, prompt)
            assert found.tokens == alone
            assert (found.accepted, found.proposed) == (expected.accepted, expected.proposed)
            assert_same(np.stack(found.logits), np.stack(expected.logits))
        for each in (tiered_main, tiered_draft):
            assert each.tiers.stats().l1.misses > 0


def exact_speculation(main: LlamaModel, draft: LlamaModel) -> tuple[list[int], list[int], Speculation]:
    """Return a prompt that stock continues with the same tokens alone and with the draft, these, and how it went.

    Not all are such: a batch of another width is rounded otherwise, and a random model's router turns on little.
    """
    for seed in range(20):
        prompt = [1, *np.random.default_rng(seed).integers(259, SMALL.vocab, 39).tolist()]
        with main.context(n_ctx=N_CTX, n_threads=1) as context:
            alone = generate(context, prompt, DRAFTED).tokens
        done = speculated(main, draft, prompt)
        if done.tokens == alone and 0 < done.accepted < done.proposed:
            return prompt, alone, done
    raise AssertionError("of 20 prompts stock continues none with a draft as it does alone")


def speculated(main: LlamaModel, draft: LlamaModel, prompt: list[int]) -> Speculation:
    """Speculate in contexts of their own."""
    with (
        main.context(n_ctx=N_CTX, n_threads=1) as context,
        draft.context(n_ctx=N_CTX, n_threads=1) as of_draft,
    ):
        return speculate(context, of_draft, prompt, DRAFTED)


@pytest.mark.parametrize("n_slots", SEVERAL)
@pytest.mark.parametrize("split", [Split.ONE, Split.LAYER])
@on_devices
def test_two_contexts_at_once(session: DeviceSession, split, n_slots):
    """Each on a thread of its own, over slots that they share."""
    if session.kind == "RPC":
        pytest.skip("stock llama.cpp ends the process where two contexts use one server at the same time")
    path = write_kind(session, KIND)
    prompts = [prompt_tokens(40), prompt_tokens(60)[:19:-1]]
    expected = [stock_logits(session, path, split, prompt, TOKENS) for prompt in prompts]
    shape = replace(SHAPE, n_ctx=2 * N_CTX)
    with tiered(session, path, split, n_slots, host_pool_bytes=POOL, shape=shape) as opened:

        def work(i: int) -> None:
            for _ in range(3):
                assert_same(logits_of(opened.model, prompts[i], TOKENS), expected[i])

        run_at_once([partial(work, i) for i in range(2)])


@pytest.mark.parametrize("n_slots", SEVERAL)
@pytest.mark.parametrize("split", EVERY_SPLIT)
@on_devices
def test_two_contexts_take_turns(session: DeviceSession, split, n_slots):
    """Token by token: what one has queued is not done when the other's misses look for slots."""
    path = write_kind(session, KIND)
    prompts = [prompt_tokens(40), prompt_tokens(60)[:19:-1]]
    expected = [stock_logits(session, path, split, prompt, TOKENS) for prompt in prompts]
    with tiered(session, path, split, n_slots, host_pool_bytes=POOL) as opened, ExitStack() as stack:
        contexts = [stack.enter_context(opened.model.context(n_ctx=N_CTX, n_threads=1)) for _ in prompts]
        found: list[list[np.ndarray]] = [[] for _ in prompts]
        for context, prompt, rows in zip(contexts, prompts, found, strict=True):
            context.decode(prompt, 0, all_logits=True)
            rows += [context.logits(i) for i in range(len(prompt))]
        for position in range(40, 40 + TOKENS):
            for context, rows in zip(contexts, found, strict=True):
                context.decode([int(rows[-1].argmax())], position)
                rows.append(context.logits())
    for rows, logits in zip(found, expected, strict=True):
        assert_same(np.stack(rows), logits)


@pytest.mark.parametrize("n_slots", [SMALL.top_k, *SEVERAL])
@pytest.mark.parametrize("split", EVERY_SPLIT)
@on_devices
def test_four_sequences_in_a_batch(session: DeviceSession, split, n_slots):
    """As a server with four slots runs them: prompts one after another, then a token of each at a time."""
    path = write_kind(session, KIND)
    with stock_model(session, path, split) as model, four_sequences(model) as context:
        expected = run_four(context)
    with (
        tiered(session, path, split, n_slots, host_pool_bytes=POOL) as opened,
        four_sequences(opened.model) as context,
    ):
        for _ in range(2):
            assert_same(run_four(context), expected)
        counters = opened.binding.counters()
        if n_slots == SMALL.experts // 2:  # with fewer, four tokens' experts are streamed
            assert counters.lookups > 0, counters
        else:
            assert counters.fully_resident_calls + counters.streamed_calls > 0, counters


def four_sequences(model: LlamaModel) -> LlamaContext:
    return model.context(n_ctx=1024, n_threads=1, n_seq_max=4)


def run_four(context: LlamaContext) -> Logits:
    """Return the logits of four sequences' prompts and of their tokens after them."""
    lengths = (40, 33, 50, 64)
    found, following = [], []
    for sequence, length in enumerate(lengths):
        prompt = prompt_tokens(140)[20 * sequence :][:length]
        context.forget(sequence)
        context.decode(prompt, 0, sequence=sequence, all_logits=True)
        found += [context.logits(i) for i in range(length)]
        following.append(int(found[-1].argmax()))
    for step in range(TOKENS):
        rows = []
        for sequence, length in enumerate(lengths):
            context.decode([following[sequence]], length + step, sequence=sequence)
            rows.append(context.logits())
        found += rows
        following = [int(row.argmax()) for row in rows]
    return np.stack(found)
