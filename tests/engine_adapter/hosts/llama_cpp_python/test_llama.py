"""Our class: what it gives to stock and what to the tiers, what it refuses, and that it frees everything."""

from __future__ import annotations

import gc
import pickle
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from engine_runs.drop_in.stand_ins import Params, StockLlama, ToyModel
from expertier.engine_adapter.opening import close_abandoned
from expertier.errors import (
    BudgetError,
    ConfigError,
    EngineMismatchError,
    LeaseError,
    NotGgufError,
    NotMoeError,
)
from expertier.tiers.manager import TierManager
from interruptions.interrupt_at import at_every_instruction, n_instructions
from model_files.gguf_files import write_model as write_raw_model


@pytest.fixture
def managers(drop_in: Any, monkeypatch: pytest.MonkeyPatch) -> list[TierManager]:
    """The managers of all tiers that the class opens, as they come."""
    found: list[TierManager] = []
    real = drop_in.open_tiers

    def open_tiers(*arguments: Any) -> Any:
        opened = real(*arguments)
        found.extend(opened.tiers.managers)
        return opened

    monkeypatch.setattr(drop_in, "open_tiers", open_tiers)
    return found


def test_the_arguments_go_to_stock_and_the_budgets_to_the_tiers(drop_in, model, monkeypatch):
    monkeypatch.setenv("MOE_EXPERT_CACHE_MIB", "9")
    monkeypatch.setenv("MOE_POLICY", "lru")
    llama = drop_in.Llama(
        model, expert_cache_mib=8, host_pool_mib="2", n_ctx=64, n_gpu_layers=-1, verbose=False
    )
    assert isinstance(llama, sys.modules["llama_cpp"].Llama)
    assert llama.model_path == str(model)
    assert llama.arguments == {"n_ctx": 64, "n_gpu_layers": -1, "verbose": False}
    assert llama.tiers.stats().l1.budget_bytes == 8 << 20
    assert llama.tiers.stats().l2.budget_bytes == 2 << 20
    (opened,) = ToyModel.opened
    assert opened["tiers"] is llama.tiers
    assert isinstance(opened["params"], Params)
    again = drop_in.Llama(**llama.__getstate__())
    assert again.tiers.stats().l1.budget_bytes == 8 << 20
    assert llama.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    for each in (llama, again):
        each.close()
        each.close()


def test_the_variables_count_where_no_argument_is(drop_in, model, monkeypatch):
    monkeypatch.setenv("MOE_EXPERT_CACHE_MIB", "7")
    llama = drop_in.Llama(str(model), verbose=False)
    assert llama.tiers.stats().l1.budget_bytes == 7 << 20
    llama.close()


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"expert_cache_mib": "much"}, ConfigError, "MOE_EXPERT_CACHE_MIB='much' cannot be read"),
        ({"expert_cache_mib": 0}, ConfigError, "MOE_EXPERT_CACHE_MIB=0"),
        ({"host_pool_frac": 101}, ConfigError, "MOE_HOST_POOL_FRAC='101'"),
        ({"policy": "best"}, ConfigError, "MOE_POLICY='best'"),
        ({"expert_cache_mib": 0.001}, BudgetError, "at least"),
        ({"vocab_only": True}, ConfigError, "vocab_only=True cannot be used with tiers"),
        ({"lora_path": "a.gguf"}, ConfigError, "lora_path='a.gguf' cannot be used with tiers"),
    ],
)
def test_what_is_refused(drop_in, model, arguments, error, says):
    with pytest.raises(error, match=says):
        drop_in.Llama(model, verbose=False, **arguments)
    assert ToyModel.opened == []


def test_a_model_without_experts_is_refused(drop_in, tmp_path):
    with suppress(NotMoeError):
        write_raw_model(tmp_path / "dense.gguf", [None, None])
    with pytest.raises(NotMoeError, match="dense model"):
        drop_in.Llama(tmp_path / "dense.gguf")
    (tmp_path / "text.gguf").write_text("no model")
    with pytest.raises(NotGgufError):
        drop_in.Llama(tmp_path / "text.gguf")


def test_a_failure_after_the_load_frees_everything(drop_in, model, managers, monkeypatch):
    def fail(*_):
        raise ValueError("Failed to create llama_context")

    monkeypatch.setattr(drop_in, "WatchedBatches", fail)
    with pytest.raises(ValueError, match="llama_context"):
        drop_in.Llama(model, verbose=False)
    with pytest.raises(LeaseError, match="closed"):
        managers[0].acquire(0, [0])


def test_an_interrupt_at_any_time_frees_everything(drop_in, model, managers):
    kept = []

    def open_and_close() -> None:
        kept.append(drop_in.Llama(model, expert_cache_mib=3, host_pool_mib=0, verbose=False))
        kept[-1].close()

    open_and_close()
    gc.collect()
    gc.freeze()
    folders = [str(Path(drop_in.__file__).parents[1]) + "/"]
    n = n_instructions(open_and_close, folders)
    n_done = 0
    for found in at_every_instruction(open_and_close, folders, at=range(5, n - 5, n // 12)):
        assert isinstance(found.error, KeyboardInterrupt), found
        del found
        kept.clear()
        gc.collect()
        close_abandoned()
        for manager in managers:
            with pytest.raises(LeaseError, match="closed"):
                manager.acquire(0, [0])
        managers.clear()
        n_done += 1
    gc.unfreeze()
    assert n_done >= 10
    open_and_close()


def test_a_stock_class_that_loads_otherwise_is_refused(drop_in, model, monkeypatch):
    monkeypatch.setattr(StockLlama, "loads", False)
    with pytest.raises(EngineMismatchError, match="no tiers are in it"):
        drop_in.Llama(model, verbose=False)


def test_a_stock_class_of_another_make_is_refused(drop_in, model, monkeypatch):
    monkeypatch.setattr(drop_in, "_OWN", ("_ctx", "_renamed"))
    with pytest.raises(EngineMismatchError, match="has no _renamed"):
        drop_in.Llama(model, verbose=False)
