"""The engine with a proxy whose allocations fail on demand, for a process of its own: a failure may end it."""

from __future__ import annotations

import ctypes as ct
import faulthandler
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from engine_runs.native_build import build_library
from engine_runs.tiered_runs import assert_nothing_held, make_tiers, prompt_tokens
from expertier.engine_adapter.build.compiler import list_sources
from expertier.engine_adapter.build.plugin import installed_sources
from expertier.engine_adapter.llama_cpp import LlamaModel, LoadedEngine
from expertier.errors import DecodeError, EngineError
from expertier.tiers.tier_set import TierSet
from limits.waits import joined

SOURCE = Path(__file__).with_name("failing_new.cpp")

_PROMPT = prompt_tokens(3)
_OTHERS = prompt_tokens(11)[3:]  # evict what the prompt needs
_MOST = 5000
_HANG_S = 240


def build_proxy() -> Path:
    """Compile the proxy's sources with ours, so that their allocations are ours, strings' included."""
    proxy, _ = list_sources(installed_sources())
    return build_library(
        "failing_proxy",
        [*proxy, SOURCE],
        flags=(
            "-O0",
            "-D_GLIBCXX_EXTERN_TEMPLATE=0",
        ),
        link_flags=("-Wl,-Bsymbolic",),
    )


@dataclass(frozen=True)
class Setup:
    """What a child process needs."""

    libraries: Sequence[Path]
    proxy: Path
    host: Path
    model: Path

    def load(self) -> LoadedEngine:
        """Load the engine with the proxy whose allocations fail; a process that hangs from here on ends itself."""
        faulthandler.dump_traceback_later(_HANG_S, exit=True)
        engine = LoadedEngine.load(self.libraries, self.proxy, self.host)
        engine.proxy.fail_allocation.argtypes = engine.proxy.set_seconds_early.argtypes = (ct.c_int64,)
        return engine


def fail_each(engine: LoadedEngine, attempt: Callable[[], None], check: Callable[[], None]) -> list[str]:
    """Make `attempt` with its first allocation failing, then its second, and so on; return the errors.

    `check` runs after each attempt, when nothing fails any more.
    """
    errors = []
    for n in range(1, _MOST):
        engine.proxy.fail_allocation(n)
        error = None
        try:
            attempt()
        except EngineError as raised:
            error = raised
        failed = engine.proxy.allocation_has_failed()
        engine.proxy.fail_allocation(0)
        assert failed or error is None, f"an error although nothing failed: {error}"
        assert error is not None or not failed, f"allocation {n} failed and nobody was told"
        check()
        if not failed:
            return errors
        errors.append(str(error))
    raise AssertionError(f"more than {_MOST} allocations")


def decode(setup: Setup, n_slots: int) -> list[str]:
    """Fail each allocation of a batch with misses; the batch must work afterwards."""
    engine = setup.load()
    with (
        make_tiers(setup.model, n_slots) as tiers,
        LlamaModel.open(engine, setup.model, tiers=TierSet.of(tiers)) as model,
        model.context(n_ctx=128, n_threads=1) as context,
    ):

        def logits() -> bytes:
            context.forget()
            context.decode(_PROMPT, 0, all_logits=True)
            return np.stack([context.logits(i) for i in range(len(_PROMPT))]).tobytes()

        def evict() -> None:
            context.forget()
            context.decode(_OTHERS, 0)
            context.forget()

        expected = logits()

        def check() -> None:
            assert_nothing_held(tiers)
            assert logits() == expected
            evict()

        evict()
        return fail_each(engine, lambda: context.decode(_PROMPT, 0), check)


def open_model(setup: Setup) -> list[str]:
    """Fail each allocation of opening a model and its first context; the tiers must be free afterwards."""
    engine = setup.load()
    with make_tiers(setup.model, 4) as tiers:

        def attempt() -> None:
            with (
                LlamaModel.open(engine, setup.model, tiers=TierSet.of(tiers)) as model,
                model.context(n_ctx=128, n_threads=1),
            ):
                pass

        def check() -> None:
            assert not tiers._usage.bound
            assert_nothing_held(tiers)

        return fail_each(engine, attempt, check)


@contextmanager
def _held_by_another(tiers, experts: Sequence[int]) -> Iterator[None]:
    """Have another thread hold a lease of layer 0, and keep waking all who wait for the layer."""
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with tiers.acquire(0, experts):
            held.set()
            while not done.wait(0.05):  # a pause: between two wakes
                tiers._parts.locks.notify_all(0)

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    assert held.wait(30)
    try:
        yield
    finally:
        done.set()
        joined(thread)


def wait_for_others(setup: Setup) -> float:
    """Decode while another thread holds all slots of a layer; return how long it took to give up."""
    engine = setup.load()
    with (
        make_tiers(setup.model, 4) as tiers,
        LlamaModel.open(engine, setup.model, tiers=TierSet.of(tiers)) as model,
        model.context(n_ctx=128, n_threads=1) as context,
    ):
        with _held_by_another(tiers, range(4)):
            engine.proxy.set_seconds_early(59)
            start = time.monotonic()
            with pytest.raises(DecodeError, match="other threads held its slots"):
                context.decode([1, 300], 0)
            duration = time.monotonic() - start
            engine.proxy.set_seconds_early(0)
            assert not tiers._usage.holds_slots(threading.get_ident())
        assert_nothing_held(tiers)
        context.decode([1, 300], 0)
        return duration
