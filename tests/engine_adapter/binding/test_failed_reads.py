"""A failed read of expert bytes fails that decode, with the engine's status and our message, and nothing else."""

from __future__ import annotations

import errno
import os

import numpy as np
import pytest

from engine_runs.tiered_runs import SMALL, make_tiers, prompt_tokens, run_model
from expertier.engine_adapter.binding.tier_binding import TierBinding
from expertier.engine_adapter.llama_cpp import LlamaModel, selftest
from expertier.errors import DecodeError, EngineMismatchError, SourceError
from expertier.tiers.tier_set import TierSet
from failures.failing_reads import FailingReads


@pytest.fixture(scope="module")
def expected(loaded_engine, path):
    return run_model(loaded_engine, path, None, n_tokens=8, prompt=prompt_tokens(40))


@pytest.mark.parametrize("n_slots", [1, SMALL.top_k - 1, SMALL.experts // 2, SMALL.experts])
@pytest.mark.parametrize("nth", [1, 2, 7, 40])
@pytest.mark.parametrize("host_pool_bytes", [0, 8 << 20])
def test_the_decode_fails_and_the_next_works(
    loaded_engine, path, expected, monkeypatch, n_slots, nth, host_pool_bytes
):
    reads = FailingReads(monkeypatch)
    with (
        make_tiers(path, n_slots, host_pool_bytes=host_pool_bytes) as tiers,
        LlamaModel.open(loaded_engine, path, tiers=TierSet.of(tiers)) as model,
        model.context(n_ctx=128, n_threads=1) as context,
    ):
        reads.fail_call(nth)
        with pytest.raises(DecodeError, match="status -3") as caught:
            context.decode(prompt_tokens(40), 0)
        assert reads.failed == 1
        assert isinstance(caught.value.__cause__, SourceError)
        assert str(path) in str(caught.value)
        assert os.strerror(errno.EIO) in str(caught.value)

        logits = []
        context.forget()
        context.decode(prompt_tokens(40), 0, all_logits=True)
        logits += [context.logits(i) for i in range(40)]
        for position in range(40, 48):
            context.decode([context.sample()], position)
            logits.append(context.logits())
        assert np.stack(logits).tobytes() == expected.logits.tobytes()
        tiers.check_valid()
        assert tiers.stats().file.failures == 1


def test_a_later_failure_does_not_have_its_cause(loaded_engine, path, monkeypatch):
    reads = FailingReads(monkeypatch)
    with (
        make_tiers(path, SMALL.top_k) as tiers,
        LlamaModel.open(loaded_engine, path, tiers=TierSet.of(tiers)) as model,
        model.context(n_ctx=128, n_threads=1) as context,
    ):
        reads.fail_call(1)
        with pytest.raises(DecodeError) as failed:
            context.decode([1, 2, 3], 0)
        assert isinstance(failed.value.__cause__, SourceError)
        model.binding.refuse_misses()
        with pytest.raises(DecodeError) as refused:
            context.decode([1, 2, 3], 0)
        assert refused.value.__cause__ is None
        model.binding.serve_misses()
        context.forget()
        context.decode([1, 2, 3], 0)


@pytest.mark.parametrize("rows", [1, 16])
def test_the_graph_is_restored_after_a_failed_read(loaded_engine, tmp_path, monkeypatch, rows):
    """The self-test's graph comes back unchanged although its fill failed: status -1 (failed), not 101."""
    reads = FailingReads(monkeypatch)
    model = selftest.write_model(tmp_path / "one.gguf", selftest._SHAPE)
    with make_tiers(model, selftest._N_SLOTS) as tiers:
        reads.fail_call(2)
        with pytest.raises(EngineMismatchError, match="status -1 "):
            selftest.check_product(loaded_engine, tiers, rows)
        selftest.check_product(loaded_engine, tiers, rows)
        tiers.check_valid()


def test_a_file_that_shrinks_while_it_is_used_says_so(loaded_engine, path, tmp_path):
    copy = tmp_path / "model.gguf"
    copy.write_bytes(path.read_bytes())
    with (
        make_tiers(copy, 2) as tiers,
        LlamaModel.open(loaded_engine, copy, tiers=TierSet.of(tiers)) as model,
        model.context(n_ctx=128, n_threads=1) as context,
    ):
        os.truncate(copy, 4096)
        with pytest.raises(DecodeError, match="size") as caught:
            context.decode([1, 2, 3], 0)
        assert str(copy) in str(caught.value)


def test_the_binding_survives_a_bind_that_fails(loaded_engine, path):
    with make_tiers(path, 2) as tiers:
        with pytest.raises(Exception, match="no proxy for device nowhere"):
            TierBinding(loaded_engine, tiers, "nowhere")
        TierBinding(loaded_engine, tiers).close()
