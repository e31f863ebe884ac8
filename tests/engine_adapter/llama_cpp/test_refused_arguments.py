"""Arguments outside their limits, and files that are not the tiers' own: refused with a message that says so."""

from __future__ import annotations

import os
import shutil

import pytest

from engine_runs.tiered_runs import make_tiers, write_small_model
from expertier.engine_adapter.llama_cpp import LlamaModel
from expertier.errors import ConfigError, DecodeError, EngineError
from expertier.tiers.tier_set import TierSet


@pytest.mark.parametrize("n_batch", [2048, 1 << 20])
def test_a_batch_is_no_longer_than_the_context(open_tiered, n_batch):
    with open_tiered(n_ctx=100, n_batch=n_batch) as (_, _, context):
        limit = context.n_batch
        assert limit == 100 <= context.n_ctx
        with pytest.raises(DecodeError, match=f"takes 1 to {limit} at once"):
            context.decode([1] * (limit + 1), 0)
        context.decode([1] * limit, 0)


def test_tokens_outside_the_vocabulary(open_tiered):
    with open_tiered() as (_, model, _):
        for token in (-1, model.n_vocab, -(2**31), 2**31 - 1):
            with pytest.raises(EngineError, match=f"no token {token}: the vocabulary has {model.n_vocab}"):
                model.piece(token)
            assert not model.is_end(token)
        assert all(isinstance(model.piece(token), bytes) for token in range(model.n_vocab))


def test_flash_attention_is_one_of_three_words(open_tiered):
    with open_tiered() as (_, model, _):
        for word in ("maybe", "", "ON"):
            with pytest.raises(ConfigError, match="auto, off, on"):
                model.context(n_ctx=64, flash_attention=word)
        for word in ("auto", "off", "on"):
            model.context(n_ctx=64, flash_attention=word).close()


def test_only_the_tiers_own_file_is_opened(loaded_engine, path, tmp_path):
    """Another model, even a copy, would run with the experts of the tiers' file."""
    other = write_small_model(tmp_path, "F32")
    copy = shutil.copy(path, tmp_path / "copy.gguf")
    link = tmp_path / "link.gguf"
    link.symlink_to(path)
    for wrong in (other, copy, tmp_path / "missing.gguf", tmp_path):
        with make_tiers(path, 2) as tiers:
            with pytest.raises(EngineError) as caught:
                LlamaModel.open(loaded_engine, wrong, tiers=TierSet.of(tiers))
            assert str(wrong) in str(caught.value)
            assert not tiers._usage.bound
    with make_tiers(path, 2) as tiers:
        with pytest.raises(TypeError):
            LlamaModel.open(loaded_engine, None, tiers=TierSet.of(tiers))
        LlamaModel.open(loaded_engine, link, tiers=TierSet.of(tiers)).close()


def test_a_file_that_changed_since_the_tiers_were_made(loaded_engine, path, tmp_path):
    copy = tmp_path / "model.gguf"
    shutil.copy(path, copy)
    with make_tiers(copy, 2) as tiers:
        os.utime(copy, ns=(1, 1))
        with pytest.raises(EngineError, match="not the file that the tiers were made for, or it has changed"):
            LlamaModel.open(loaded_engine, copy, tiers=TierSet.of(tiers))
