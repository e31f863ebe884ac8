"""Models of several files: found by any of them, read across them, refused when one is missing or foreign."""

from __future__ import annotations

import ctypes
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine_runs.tiered_runs import SMALL, make_tiers, prompt_tokens, run_model, write_small_model
from expertier.engine_adapter.llama_cpp import LlamaModel
from expertier.engine_adapter.models.synth import write_model
from expertier.errors import SourceError, TruncatedModelError, UnsupportedLayoutError
from expertier.hip import open_device
from expertier.tiers.manager import TierManager
from expertier.tiers.model.table import ExpertTable
from expertier.tiers.tier_set import TierSet
from expertier.units import KIB
from model_files.shard_files import split_model


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return write_small_model(tmp_path_factory.mktemp("whole"), "Q4_K+Q6_K")


@pytest.fixture
def shards(whole, tmp_path):
    return split_model(whole, tmp_path, 3)


@pytest.mark.parametrize("n_shards", [2, 3, 7])
@pytest.mark.parametrize("n_slots", [3, SMALL.experts])
def test_parity(loaded_engine, whole, tmp_path, n_shards, n_slots):
    shards = split_model(whole, tmp_path, n_shards)
    prompt = prompt_tokens(80)
    expected = run_model(loaded_engine, shards[0], None, prompt=prompt, n_tokens=16)
    one_file = run_model(loaded_engine, whole, None, prompt=prompt, n_tokens=16)
    assert expected.logits.tobytes() == one_file.logits.tobytes(), "the split model is the same model"
    with make_tiers(shards[-1], n_slots) as tiers:
        found = run_model(loaded_engine, shards[0], tiers, prompt=prompt, n_tokens=16)
        tiers.check_valid()
    assert found.logits.tobytes() == expected.logits.tobytes()


def test_loading_reads_no_experts(loaded_engine, shards):
    with (
        make_tiers(shards[1], 2) as tiers,
        LlamaModel.open(loaded_engine, shards[0], tiers=TierSet.of(tiers)) as model,
    ):
        counts = model.load_counts()
        assert counts.expert_bytes == 0
        others = tiers.table.file_bytes - tiers.table.expert_bytes_total
        assert others - 256 * KIB <= counts.bytes_read <= others + 256 * KIB
        assert model.binding.counters().dropped_writes == tiers.table.expert_bytes_total


def test_the_table_is_the_same_by_any_name(shards, whole):
    tables = [ExpertTable.from_gguf(path) for path in shards]
    assert tables[0] == tables[1] == tables[2]
    table, one = tables[0], ExpertTable.from_gguf(whole)
    assert [file.path for file in table.files] == shards
    assert table.path == shards[0]
    assert table.expert_bytes_total == one.expert_bytes_total
    data = b"".join(path.read_bytes() for path in shards)
    assert table.file_bytes == len(data)
    for layer in range(table.n_layers):
        for expert in (0, SMALL.experts - 1):
            here = [data[offset : offset + size] for offset, size in table.span(layer, expert)]
            there = [whole.read_bytes()[offset : offset + size] for offset, size in one.span(layer, expert)]
            assert here == there


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_missing_shard_is_named(shards, missing):
    shards[missing].unlink()
    asked = shards[(missing + 1) % 3]
    with pytest.raises(UnsupportedLayoutError, match=rf"{shards[missing].name} is missing") as caught:
        ExpertTable.from_gguf(asked)
    assert str(asked) in str(caught.value)


def test_a_shard_in_the_wrong_place_is_named(shards):
    shutil.copy(shards[2], shards[1])
    with pytest.raises(
        UnsupportedLayoutError, match=rf"{shards[1].name} is not shard 2 .*split\.no is 2, 1 is"
    ):
        ExpertTable.from_gguf(shards[0])


def test_a_foreign_shard_is_named(shards, tmp_path):
    other = write_model(tmp_path / "other.gguf", replace(SMALL, layers=2))
    (tmp_path / "b").mkdir()
    foreign = split_model(other, tmp_path / "b", 3)
    shutil.copy(foreign[1], shards[1])
    with pytest.raises(
        UnsupportedLayoutError, match=rf"{shards[1].name} is not shard 2 .*split\.tensors\.count"
    ):
        ExpertTable.from_gguf(shards[0])


def test_a_cut_shard_is_named(shards):
    data = shards[2].read_bytes()
    shards[2].write_bytes(data[: len(data) // 2])
    with pytest.raises(TruncatedModelError, match=shards[2].name):
        ExpertTable.from_gguf(shards[0])


def test_shards_under_names_of_their_own_are_refused(shards, tmp_path):
    odd = tmp_path / "odd.gguf"
    shards[0].rename(odd)
    with pytest.raises(
        UnsupportedLayoutError, match=r"one of 3 shards .*name the shards NAME-00001-of-00003"
    ):
        ExpertTable.from_gguf(odd)


def test_a_shard_that_changes_after_the_table_was_read(shards):
    table = ExpertTable.from_gguf(shards[0])
    shards[1].write_bytes(shards[1].read_bytes())
    with pytest.raises(SourceError, match=shards[1].name):
        TierManager(table, device=open_device("host"))


def test_leases_show_the_bytes_of_all_shards(shards):
    data = b"".join(Path(path).read_bytes() for path in shards)
    with make_tiers(shards[0], 2) as tiers:
        for layer in range(tiers.table.n_layers):
            with tiers.acquire(layer, [5]) as lease:
                (group,) = lease.groups
                for matrix in tiers.table.layers[layer].matrices:
                    view = lease.view(matrix.role)
                    address = view.address + int(group.slots[0]) * view.stride_bytes
                    offset, size = matrix.span(5)
                    assert ctypes.string_at(address, size) == data[offset : offset + size]
                    assert np.frombuffer(data[offset : offset + size], np.uint8).any()
