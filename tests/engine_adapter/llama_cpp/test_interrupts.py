"""Ctrl-C while the engine runs: raised as KeyboardInterrupt when the engine is done, at whatever moment it came."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from engine_runs.tiered_runs import SMALL, assert_nothing_held, make_tiers, prompt_tokens
from expertier.engine_adapter.llama_cpp import LlamaModel
from expertier.errors import DecodeError
from expertier.tiers.tier_set import TierSet
from limits.waits import joined

PROMPT = prompt_tokens(40)
N_MOMENTS = 30


@pytest.fixture(autouse=True)
def default_handler() -> Iterator[None]:
    """Start with Python's own SIGINT handler, and restore it after tests that set another."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module")
def stock(loaded_engine, path):
    """The stock engine's logits of the prompt."""
    with (
        LlamaModel.open(loaded_engine, path, repack=False) as model,
        model.context(n_ctx=128, n_ubatch=16, n_threads=1) as context,
    ):
        return logits_of_prompt(context)


def logits_of_prompt(context):
    context.forget()
    context.decode(PROMPT, 0, all_logits=True)
    return np.stack([context.logits(i) for i in range(len(PROMPT))]).tobytes()


def decode_for_ever(context):
    while True:
        context.forget()
        context.decode(PROMPT, 0)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """Send SIGINT from another thread, within the block at the latest."""
    timer = threading.Timer(seconds, interrupt)
    timer.start()
    try:
        yield
    finally:
        joined(timer)


@pytest.mark.parametrize("n_slots", [2, pytest.param(SMALL.experts // 2, marks=pytest.mark.deep)])
def test_at_any_moment(open_tiered, stock, n_slots):
    with open_tiered(n_slots) as (tiers, _, context):
        start = time.perf_counter()
        logits_of_prompt(context)
        duration = time.perf_counter() - start
        for moment in np.linspace(0, 1.5 * duration, N_MOMENTS):
            with pytest.raises(KeyboardInterrupt), interrupted_after(moment):
                decode_for_ever(context)
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
            assert_nothing_held(tiers)
            assert logits_of_prompt(context) == stock


@pytest.mark.parametrize("n_slots", [2, SMALL.experts // 2])
def test_at_any_read(open_tiered, reads, stock, n_slots):
    """The signal is handled within the callback that serves misses, where no exception may rise."""
    with open_tiered(n_slots) as (tiers, _, context):
        logits_of_prompt(context)
        n_reads = reads.calls
        for nth in (1, 2, 3, n_reads // 3, n_reads // 2):
            due = reads.calls + nth
            reads.before_each = lambda due=due: interrupt() if reads.calls == due else None
            context.forget()
            with pytest.raises(KeyboardInterrupt):
                context.decode(PROMPT, 0)
            reads.before_each = None
            assert_nothing_held(tiers)
            assert logits_of_prompt(context) == stock


def test_the_batch_ends_early(open_tiered, reads, stock):
    with open_tiered(1) as (_, _, context):
        logits_of_prompt(context)
        n_reads = reads.calls
        before = reads.calls
        reads.before_each = lambda: interrupt() if reads.calls == before + 1 else None
        context.forget()
        with pytest.raises(KeyboardInterrupt):
            context.decode(PROMPT, 0)
        assert reads.calls - before < n_reads / 10
        reads.before_each = None
        assert logits_of_prompt(context) == stock


def test_with_a_failed_read(open_tiered, reads, stock):
    """The interrupt is raised with the failed read as its context; the next batch does not report that failure."""
    with open_tiered(2) as (tiers, _, context):
        reads.before_each = lambda: interrupt() if reads.calls == 3 else None
        reads.fail_call(3)
        with pytest.raises(KeyboardInterrupt):
            context.decode(PROMPT, 0)
        assert reads.failed == 1
        assert_nothing_held(tiers)
        assert logits_of_prompt(context) == stock


def test_the_handler_is_back_after_a_failed_batch(open_tiered, reads):
    with open_tiered(2) as (_, _, context):
        reads.fail_call(1)
        with pytest.raises(DecodeError):
            context.decode(PROMPT, 0)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_threads_are_not_interrupted(open_tiered, stock):
    """Ctrl-C interrupts the main thread, whatever it does; a batch on another thread goes on."""
    found, started = [], threading.Event()
    with open_tiered(2) as (_, _, context):

        def run():
            started.set()
            found.append(logits_of_prompt(context))

        for moment in (0.0, 0.003, 0.01):
            started.clear()
            thread = threading.Thread(target=run, daemon=True)
            thread.start()
            assert started.wait(30)
            with pytest.raises(KeyboardInterrupt), interrupted_after(moment):
                time.sleep(60)  # a pause: this is what is interrupted
            joined(thread)
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert found == [stock] * 3


def test_a_handler_of_the_programs_own_is_left_alone(open_tiered, reads, stock):
    calls = []

    def count(_number, _frame):
        calls.append(signal.getsignal(signal.SIGINT))

    signal.signal(signal.SIGINT, count)
    with open_tiered(2) as (_, _, context):
        reads.before_each = lambda: interrupt() if reads.calls % 20 == 0 else None
        assert logits_of_prompt(context) == stock
    assert calls == [count] * (reads.calls // 20)
    assert signal.getsignal(signal.SIGINT) is count


def test_ignored_interrupts_stay_ignored(open_tiered, reads, stock):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with open_tiered(2) as (_, _, context):
        reads.before_each = interrupt
        assert logits_of_prompt(context) == stock
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_a_handler_that_raises_fails_the_batch(open_tiered, reads, stock):
    """An exception of the callback cannot cross the engine's frames, so it becomes the cause of the batch's error."""

    class StopNowError(Exception):
        pass

    def stop(_number, _frame):
        raise StopNowError

    signal.signal(signal.SIGINT, stop)
    with open_tiered(2) as (tiers, _, context):
        reads.before_each = lambda: interrupt() if reads.calls == 5 else None
        with pytest.raises(DecodeError) as caught:
            context.decode(PROMPT, 0)
        assert isinstance(caught.value.__cause__, StopNowError)
        assert_nothing_held(tiers)
        assert logits_of_prompt(context) == stock


def test_nothing_is_freed_twice(loaded_engine, path, monkeypatch):
    """An interrupt that comes right after the engine freed a context, or a model."""
    freed = []

    def freeing(name):
        free = getattr(loaded_engine.host, name)

        def free_and_interrupt(handle):
            free(handle)
            freed.append(name)
            interrupt()

        monkeypatch.setattr(loaded_engine.host, name, free_and_interrupt)

    with make_tiers(path, 2) as tiers:
        model = LlamaModel.open(loaded_engine, path, tiers=TierSet.of(tiers))
        context = model.context(n_ctx=64, n_threads=1)
        freeing("expertier_context_close")
        freeing("expertier_model_close")
        for opened in (context, model):
            with pytest.raises(KeyboardInterrupt):
                opened.close()
            opened.close()
        assert freed == ["expertier_context_close", "expertier_model_close"]
        assert not tiers._usage.bound
