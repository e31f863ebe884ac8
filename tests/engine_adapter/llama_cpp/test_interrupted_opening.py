"""An interrupt at every instruction of loading a model, of opening a context, and of closing both.

It is raised as KeyboardInterrupt; no model, context or binding is left, no slot is held, and the next load works.
Instructions are counted in our own files, which is where something is held from one to the next. The quick tests take a
sample that is spread over all of them.
"""

from __future__ import annotations

import ctypes as ct
import gc
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import expertier.engine_adapter
from engine_runs.tiered_runs import assert_nothing_held
from expertier.engine_adapter.abi import structs as abi
from expertier.engine_adapter.binding.tier_binding import TierBinding
from expertier.engine_adapter.llama_cpp import LlamaModel, LoadedEngine
from expertier.engine_adapter.llama_cpp.load_watch import LoadWatch
from expertier.engine_adapter.models.synth import ModelShape, write_model
from expertier.engine_adapter.opening import close_abandoned
from expertier.engine_adapter.tiered_model import TieredModel
from expertier.hip import open_device
from expertier.tiers.config.config import TierConfig
from expertier.tiers.host_pool.budget import process_budget
from expertier.tiers.manager import TierManager
from expertier.tiers.model.table import ExpertTable
from expertier.tiers.tier_set import TierSet
from interruptions.interrupt_at import Interrupted, at_every_instruction, expertier_folders, n_instructions

SHAPE = ModelShape(
    layers=1, experts=8, top_k=2, n_embd=64, n_ff=32, heads=1, kv_heads=1, head_dim=64, vocab=300, seed=1,
    gate_up_type="F32", down_type="F32",
)  # fmt: skip
N_SLOTS = 2
ADAPTER = [str(Path(expertier.engine_adapter.__file__ or "").parent) + "/"]

Run = Callable[[], Any]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> ExpertTable:
    return ExpertTable.from_gguf(write_model(tmp_path_factory.mktemp("interrupted") / "one.gguf", SHAPE))


@pytest.fixture(scope="module")
def config(table: ExpertTable) -> TierConfig:
    budget = sum(demand.bytes_for(N_SLOTS) for demand in table.layer_demands())
    return TierConfig(expert_cache_bytes=budget, host_pool_bytes=0)


@pytest.fixture
def tiers(table: ExpertTable, config: TierConfig) -> Iterator[TierManager]:
    with TierManager(table, device=open_device("host"), config=config) as manager:
        yield manager


@pytest.fixture(autouse=True)
def default_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.collect()
    gc.freeze()  # what the tests look for are cycles that came after this
    yield
    gc.unfreeze()
    signal.signal(signal.SIGINT, before)


def live(engine: LoadedEngine) -> tuple[int, int]:
    """Models and contexts that are open in the host library, after what was dropped has been closed."""
    gc.collect()
    close_abandoned()
    counted = abi.HostLive()
    engine.host.expertier_host_count_live(ct.byref(counted))
    return counted.models, counted.contexts


def sample(n: int, k: int) -> range:
    """About `k` of the numbers 1 to `n`."""
    step = max(n // k, 1)
    return range(1 + step // 2, n, step)


def must_raise(found: Interrupted) -> None:
    assert (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )  # so a second one would be raised, too
    assert isinstance(found.error, KeyboardInterrupt), found
    found.error.__traceback__ = None  # which holds the frames, and so what was being opened


def interrupted(call: Run, k: int | None, folders: list[str] | None = None) -> Iterator[str]:
    """Interrupt `call` at `k` of its instructions, at each for None, and yield where that was."""
    watched = folders or expertier_folders()
    close_abandoned()
    n = min(n_instructions(call, watched) for _ in range(3))  # what reads and when threads run varies
    at = range(1, n + 1) if k is None else sample(n, k)
    n_done = 0
    for found in at_every_instruction(call, watched, at=at):
        must_raise(found)
        place = found.place
        del found
        yield place
        n_done += 1
    assert n_done >= len(at) * 0.5, f"interrupted {n_done} times, of {len(at)} and {n} instructions"
    print(f"interrupted at {n_done} of {n} instructions")


@pytest.mark.parametrize("k", [25, pytest.param(None, marks=pytest.mark.deep)], ids=["sample", "all"])
class TestInterrupted:
    def test_loading(
        self, loaded_engine: LoadedEngine, table: ExpertTable, tiers: TierManager, k: int | None
    ):
        def load() -> None:
            with LlamaModel.open(loaded_engine, table.path, tiers=TierSet.of(tiers)):
                pass

        load()
        for place in interrupted(load, k):
            assert live(loaded_engine) == (0, 0), place
            assert not tiers._usage.bound, place
            assert_nothing_held(tiers)
        load()

    def test_a_context(
        self, loaded_engine: LoadedEngine, table: ExpertTable, tiers: TierManager, k: int | None
    ):
        with LlamaModel.open(loaded_engine, table.path, tiers=TierSet.of(tiers)) as model:

            def open_context() -> None:
                with model.context(n_ctx=64, n_threads=1):
                    pass

            open_context()
            for place in interrupted(open_context, k):
                assert live(loaded_engine) == (1, 0), place
                assert model._open_contexts == 0, place
                assert_nothing_held(tiers)
            with model.context(n_ctx=64, n_threads=1) as context:
                context.decode([1], 0)
        assert live(loaded_engine) == (0, 0)

    def test_a_batch(
        self, loaded_engine: LoadedEngine, table: ExpertTable, tiers: TierManager, k: int | None
    ):
        """Its misses are served by callbacks, in which nothing may be raised: it is raised after the batch."""
        tokens = [1, *range(3, 300, 7)]
        with (
            LlamaModel.open(loaded_engine, table.path, tiers=TierSet.of(tiers)) as model,
            model.context(n_ctx=64, n_threads=1) as context,
        ):

            def decode() -> None:
                context.forget()
                context.decode(tokens, 0, all_logits=True)  # else the last layer has one row

            decode()
            decode()
            expected = context.logits().tobytes()
            misses = tiers.stats().l1.misses
            for place in interrupted(decode, k):
                assert_nothing_held(tiers)
                decode()
                assert context.logits().tobytes() == expected, place
            assert tiers.stats().l1.misses > misses

    def test_stock_models(self, loaded_engine: LoadedEngine, table: ExpertTable, k: int | None):
        def load() -> None:
            with LlamaModel.open(loaded_engine, table.path) as model, model.context(n_ctx=64, n_threads=1):
                pass

        load()
        for place in interrupted(load, k):
            assert live(loaded_engine) == (0, 0), place
        load()

    def test_a_binding(self, loaded_engine: LoadedEngine, tiers: TierManager, k: int | None):
        def bind() -> None:
            binding = TierBinding(loaded_engine, tiers)
            binding.close()

        bind()
        for place in interrupted(bind, k, ADAPTER):
            gc.collect()  # its callbacks hold it
            close_abandoned()
            assert not tiers._usage.bound, place
        bind()

    def test_a_model_with_its_tiers(
        self, loaded_engine: LoadedEngine, table: ExpertTable, config: TierConfig, k: int | None
    ):
        def load() -> None:
            with TieredModel.open(loaded_engine, table, config):
                pass

        load()
        budget = process_budget()
        pools = len(budget._accounts())
        for place in interrupted(load, k, ADAPTER):
            assert live(loaded_engine) == (0, 0), place
            assert len(budget._accounts()) == pools, place
        load()


class Asked:
    """What the engine asks between two tensors of a load; `at` says what happens when it asks for the n-th time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int, happens: Callable[[], None]) -> None:
        self.times = 0
        goes_on = LoadWatch._goes_on

        def ask(watch: LoadWatch) -> int:
            self.times += 1
            if self.times == at:
                happens()
            return goes_on(watch)

        monkeypatch.setattr(LoadWatch, "_goes_on", ask)


def send_interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("has_tiers", [False, True], ids=["stock", "tiers"])
def test_a_load_ends_between_two_tensors(
    loaded_engine: LoadedEngine,
    table: ExpertTable,
    tiers: TierManager,
    monkeypatch: pytest.MonkeyPatch,
    has_tiers: bool,
):
    def load() -> None:
        LlamaModel.open(
            loaded_engine, table.path, tiers=TierSet.of(tiers) if has_tiers else None, mapped=has_tiers
        ).close()

    whole = Asked(monkeypatch, 0, send_interrupt)
    load()
    monkeypatch.undo()
    assert whole.times > 6
    for nth in range(1, whole.times):
        asked = Asked(monkeypatch, nth, send_interrupt)
        with pytest.raises(KeyboardInterrupt):
            load()
        assert asked.times == nth
        monkeypatch.undo()
        assert live(loaded_engine) == (0, 0)
        assert not tiers._usage.bound
    load()


@pytest.mark.parametrize("opens", ["model", "context"])
def test_right_after_the_engine_has_opened_it(
    loaded_engine: LoadedEngine,
    table: ExpertTable,
    tiers: TierManager,
    monkeypatch: pytest.MonkeyPatch,
    opens: str,
):
    """The one instruction at which only the engine knows of what it has opened."""
    name = f"expertier_{opens}_open"
    really = getattr(loaded_engine.host, name)

    def open_and_interrupt(*arguments: Any) -> int:
        handle: int = really(*arguments)
        send_interrupt()
        return handle

    def load() -> None:
        with (
            LlamaModel.open(loaded_engine, table.path, tiers=TierSet.of(tiers)) as model,
            model.context(n_ctx=64, n_threads=1),
        ):
            pass

    monkeypatch.setattr(loaded_engine.host, name, open_and_interrupt)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            load()
        assert live(loaded_engine) == (0, 0)
    monkeypatch.undo()
    load()


def test_what_a_handler_of_the_programs_own_raises_ends_a_load(
    loaded_engine: LoadedEngine, table: ExpertTable, monkeypatch: pytest.MonkeyPatch
):
    class StopNowError(Exception):
        pass

    def stop(_number: int, _frame: object) -> None:
        raise StopNowError

    signal.signal(signal.SIGINT, stop)
    whole = Asked(monkeypatch, 0, send_interrupt)
    LlamaModel.open(loaded_engine, table.path).close()
    n_asked = whole.times
    monkeypatch.undo()
    goes_on = LoadWatch._goes_on
    asked = 0

    def ask(watch: LoadWatch) -> int:
        nonlocal asked
        asked += 1
        try:
            if asked == 2:
                send_interrupt()
            return goes_on(watch)
        except StopNowError as error:  # at whichever instruction it came
            watch._raised = error
            return 0

    monkeypatch.setattr(LoadWatch, "_goes_on", ask)
    with pytest.raises(StopNowError):
        LlamaModel.open(loaded_engine, table.path)
    assert asked == 2 < n_asked
    assert live(loaded_engine) == (0, 0)


def test_what_is_dropped_unclosed_is_closed_by_the_next_load(
    loaded_engine: LoadedEngine, table: ExpertTable, tiers: TierManager
):
    for _ in range(3):
        model = LlamaModel.open(loaded_engine, table.path, tiers=TierSet.of(tiers))
        context = model.context(n_ctx=64, n_threads=1)
        del model, context
    assert live(loaded_engine) == (0, 0)


def test_a_context_that_is_open_keeps_its_model(
    loaded_engine: LoadedEngine, table: ExpertTable, tiers: TierManager
):
    """The interrupt is what a `with` block raises, and not that its model could not be closed for it."""
    model = LlamaModel.open(loaded_engine, table.path, tiers=TierSet.of(tiers))
    context = model.context(n_ctx=64, n_threads=1)
    with pytest.raises(KeyboardInterrupt) as raised, model:
        raise KeyboardInterrupt
    assert "1 open context" in raised.value.__notes__[0]
    context.decode([1], 0)
    context.close()
    model.close()
    assert live(loaded_engine) == (0, 0)
