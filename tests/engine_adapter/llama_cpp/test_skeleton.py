"""Skeletons: the model's files without its experts, for engines that only take a path."""

from __future__ import annotations

import os

import pytest

from engine_runs.tiered_runs import write_small_model
from expertier.engine_adapter.build.cache import CACHE_VARIABLE
from expertier.engine_adapter.llama_cpp import skeleton
from expertier.engine_adapter.llama_cpp.skeleton import ensure_skeleton
from expertier.errors import ConfigError, SourceError
from expertier.tiers.model.table import ExpertTable
from expertier.units import KIB
from model_files.shard_files import split_model


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def model(tmp_path):
    return write_small_model(tmp_path, "Q8_0")


def all_files(table, path):
    return [path.parent / file.path.name for file in table.files]


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("n_shards", [1, 3])
def test_everything_but_the_experts_is_there(model, tmp_path, n_shards):
    if n_shards > 1:
        model = split_model(model, tmp_path, n_shards)[0]
    table = ExpertTable.from_gguf(model)
    path = ensure_skeleton(table)
    assert path.name == model.name
    whole = b"".join(file.path.read_bytes() for file in table.files)
    copy = b"".join(file.read_bytes() for file in all_files(table, path))
    expected = bytearray(whole)
    for begin, end in table.expert_ranges:
        expected[begin:end] = bytes(end - begin)
    assert copy == bytes(expected)
    taken = sum(file.stat().st_blocks * 512 for file in all_files(table, path))
    assert taken <= table.file_bytes - table.expert_bytes_total + 64 * KIB * len(table.layers) * 3
    again = ExpertTable.from_gguf(path)
    assert again.layers == table.layers


@pytest.mark.usefixtures("cache")
def test_it_is_made_once_and_anew_when_the_model_changes(model):
    first = ensure_skeleton(ExpertTable.from_gguf(model))
    made = first.stat().st_mtime_ns
    assert ensure_skeleton(ExpertTable.from_gguf(model)) == first
    assert first.stat().st_mtime_ns == made
    os.utime(model, ns=(1, 1))
    second = ensure_skeleton(ExpertTable.from_gguf(model))
    assert second != first
    assert not first.exists(), "the skeleton of what the model was is removed"


def test_a_model_that_changed_meanwhile_is_refused_and_nothing_is_left(cache, model):
    table = ExpertTable.from_gguf(model)
    os.utime(model, ns=(1, 1))
    with pytest.raises(SourceError, match="was written to"):
        ensure_skeleton(table)
    assert [path for path in (cache / "skeletons").iterdir() if path.is_dir()] == []


def test_without_holes_the_model_itself_is_loaded(cache, model, monkeypatch, caplog):
    monkeypatch.setattr(skeleton, "_has_holes", lambda *_: False)
    assert ensure_skeleton(ExpertTable.from_gguf(model)) == model
    assert "has no holes" in caplog.text
    assert [path for path in (cache / "skeletons").iterdir() if path.is_dir()] == []


def test_a_skeleton_that_others_could_have_planted(model, cache):
    table = ExpertTable.from_gguf(model)
    path = ensure_skeleton(table)
    assert path.parent.stat().st_mode & 0o777 == 0o700
    for place in (path, path.parent, cache / "skeletons", cache):
        place.chmod(0o777)
        with pytest.raises(ConfigError, match=f"from {place}: every user can write to it"):
            ensure_skeleton(table)
        place.chmod(0o700)
    assert ensure_skeleton(table) == path
