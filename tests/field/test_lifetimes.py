"""Failures in the middle, ends of processes, and models beside each other.

Each test bears the number of its row in docs/field-failures.md.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine_runs.field_tools import PROMPT, generated, stock
from engine_runs.tiered_runs import SMALL, assert_nothing_held, make_tiers
from expertier.engine_adapter.build.cache import CACHE_VARIABLE
from expertier.engine_adapter.hosts.exec import tool as exec_tool
from expertier.engine_adapter.llama_cpp import LlamaModel
from expertier.errors import BudgetError, BusyError, ConfigError, DecodeError, EngineError, SourceError
from expertier.tiers.tier_set import TierSet
from failures.failing_reads import FailingReads


def test_row_08_one_failure_costs_one_batch_and_not_the_cache(engine, path, monkeypatch):
    reads = FailingReads(monkeypatch)
    hits = {}
    for fails in (False, True):
        with (
            make_tiers(path, 8) as tiers,
            LlamaModel.open(engine, path, tiers=TierSet.of(tiers)) as model,
            model.context(n_ctx=128, n_threads=1) as context,
        ):
            if fails:
                reads.fail_call(5)
                with pytest.raises(DecodeError):
                    context.decode(PROMPT, 0)
            before = tiers.stats().l1
            lookups = model.binding.counters().lookups
            assert generated(context, PROMPT, 16) == stock(engine, path, tuple(PROMPT), 16, 512)
            after = tiers.stats().l1
            assert after.slots == before.slots == 8 * SMALL.layers
            assert model.binding.counters().lookups >= lookups + 17 * SMALL.layers
            hits[fails] = after.hits - before.hits
    assert hits[True] >= 0.9 * hits[False] > 0


@pytest.mark.parametrize("end", ["closed", "left open", "still running"])
def test_row_20_the_process_ends(engine, path, cache_folder, end):
    """Whether or not anything was closed, and it should even while a daemon thread generates."""
    script = f"""
        import sys, threading
        sys.path[:0] = {sys.path!r}
        from expertier.engine_adapter.llama_cpp import LlamaModel
        from expertier.engine_adapter.open import open_engine
        from expertier.tiers.tier_set import TierSet
        from engine_runs.tiered_runs import make_tiers, prompt_tokens

        tiers = make_tiers({str(path)!r}, 3, host_pool_bytes=1 << 20)
        model = LlamaModel.open(open_engine(), {str(path)!r}, tiers=TierSet.of(tiers))
        context = model.context(n_ctx=128, n_threads=1)
        first = threading.Event()

        def work():
            while True:
                context.forget()
                context.decode(prompt_tokens(40), 0)
                first.set()
                if {end != "still running"}:
                    break

        worker = threading.Thread(target=work, daemon=True)
        worker.start()
        assert first.wait(30)
        if {end != "still running"}:
            worker.join()
        if {end == "closed"}:
            context.close(), model.close(), tiers.close()
            assert tiers._device.device_bytes == tiers._device.pinned_bytes == 0
            assert threading.active_count() == 1, threading.enumerate()
        print("the end is near")
    """
    assert engine.proxy
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**os.environ, CACHE_VARIABLE: cache_folder},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (0, "the end is near\n"), ended.stderr


def test_row_22_a_draft_model_does_not_get_the_main_models_tiers(engine, path, other):
    def requests(with_draft: bool) -> int:
        with make_tiers(path, 8) as tiers, LlamaModel.open(engine, path, tiers=TierSet.of(tiers)) as model:
            with model.context(n_ctx=128, n_threads=1) as context:
                if with_draft:
                    with pytest.raises(BusyError, match="bound already"):
                        LlamaModel.open(engine, path, tiers=TierSet.of(tiers))
                    with pytest.raises((BusyError, EngineError)):
                        LlamaModel.open(engine, other, tiers=TierSet.of(tiers))
                    with (
                        LlamaModel.open(engine, other, repack=False) as draft,
                        draft.context(n_ctx=128, n_threads=1) as drafting,
                    ):
                        assert draft.binding is None
                        assert generated(drafting, PROMPT, 4) == stock(engine, other, tuple(PROMPT), 4, 512)
                assert generated(context, PROMPT, 4) == stock(engine, path, tuple(PROMPT), 4, 512)
            return tiers.stats().l1.hits + tiers.stats().l1.misses

    assert requests(with_draft=True) == requests(with_draft=False)


def test_row_26_the_engine_does_not_fit_what_we_have_placed(path, monkeypatch):
    """A tool is started with its own fitting off, after our budget was found good, and is not with it on."""
    plugin = SimpleNamespace(proxy_path=Path("/nowhere/proxy.so"))
    monkeypatch.setattr(
        exec_tool, "prepare_engine", lambda *_: (SimpleNamespace(has_gpu_backends=False), plugin)
    )
    monkeypatch.setattr(exec_tool, "_shared_python", lambda: Path("/nowhere/libpython.so"))
    command = ["true", "-m", str(path)]
    prepared = exec_tool.prepare_tool(command, environ={**os.environ, "LLAMA_ARG_FIT": "on"})
    assert prepared.environment["LLAMA_ARG_FIT"] == "off"
    assert "ffn_" in prepared.environment["LLAMA_ARG_OVERRIDE_TENSOR"]
    with pytest.raises(ConfigError, match=r"--fit on: the tool would place layers.*leave it out"):
        exec_tool.prepare_tool([*command, "--fit", "on"])
    too_small = {**os.environ, "MOE_EXPERT_CACHE_MIB": "0.01"}
    with pytest.raises(BudgetError, match="at least"):
        exec_tool.prepare_tool(command, environ=too_small)


@pytest.mark.parametrize("host_pool_bytes", [0, 1 << 20])
def test_row_32_a_failed_fill_leaves_no_trace_in_later_requests(engine, path, monkeypatch, host_pool_bytes):
    reads = FailingReads(monkeypatch)
    expected = stock(engine, path, tuple(PROMPT), 6, 512)
    with (
        make_tiers(path, 6, host_pool_bytes=host_pool_bytes) as tiers,
        LlamaModel.open(engine, path, tiers=TierSet.of(tiers)) as model,
        model.context(n_ctx=128, n_threads=1) as context,
    ):
        for nth in (1, 2, 3, 14, 29):
            reads.fail_call(nth)
            context.forget()
            with pytest.raises(DecodeError, match=os.strerror(errno.EIO)) as caught:
                context.decode(PROMPT, 0)
            assert isinstance(caught.value.__cause__, SourceError)
            assert_nothing_held(tiers)
            for _ in range(2):
                assert generated(context, PROMPT, 6) == expected
            assert_nothing_held(tiers)
