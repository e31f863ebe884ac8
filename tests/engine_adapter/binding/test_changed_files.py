"""The model's file is replaced, grown, overwritten or gone: while it is used, and before the engine opens it."""

from __future__ import annotations

import os
import shutil

import pytest

from engine_runs.tiered_runs import make_tiers, prompt_tokens, write_small_model
from expertier.engine_adapter.llama_cpp import LlamaModel
from expertier.errors import DecodeError, ExpertierError, SourceError
from expertier.hip import open_device
from expertier.tiers.manager import TierManager
from expertier.tiers.model.table import ExpertTable
from expertier.tiers.tier_set import TierSet
from model_files.shard_files import split_model


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return write_small_model(tmp_path_factory.mktemp("changed"), "Q8_0")


@pytest.fixture
def path(whole, tmp_path):
    return shutil.copy(whole, tmp_path / "model.gguf")


def replace(path):
    """Another file of the same size takes its place, as a download that renames at the end does."""
    other = path.with_name("other")
    other.write_bytes(bytes(path.stat().st_size))
    os.utime(other, ns=(path.stat().st_mtime_ns,) * 2)
    other.replace(path)


def grow(path):
    """The file gets longer."""
    with open(path, "ab") as file:
        file.write(bytes(4096))


def remove(path):
    """The file loses its name."""
    path.unlink()


def decoded(context):
    """The logits of a prompt and of four tokens after it."""
    logits = []
    context.decode(prompt_tokens(20), 0)
    logits.append(context.logits())
    for position in range(20, 24):
        context.decode([context.sample()], position)
        logits.append(context.logits())
    return b"".join(row.tobytes() for row in logits)


def overwrite(path):
    """Other bytes at equal size, where they were."""
    with open(path, "r+b") as file:
        file.write(bytes(path.stat().st_size))


def overwrite_and_put_the_time_back(path):
    """Other bytes at equal size, and the time at which it had been written to."""
    before = path.stat()
    while path.stat().st_ctime_ns == before.st_ctime_ns:
        overwrite(path)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("change", [replace, remove])
def test_while_it_is_used(loaded_engine, path, change):
    """What was opened goes on to be read: the output stays what it was."""
    with (
        make_tiers(path, 2) as tiers,
        LlamaModel.open(loaded_engine, path, tiers=TierSet.of(tiers)) as model,
        model.context(n_ctx=64, n_threads=1) as context,
    ):
        before = decoded(context)
        context.forget()
        reads = tiers.stats().file.reads
        change(path)
        assert decoded(context) == before
        assert tiers.stats().file.reads > reads, "experts were read again after the change"
        assert tiers.stats().file.failures == 0
        tiers.check_valid()


@pytest.mark.parametrize("change", [grow, overwrite, overwrite_and_put_the_time_back])
def test_where_it_changes_in_place_while_it_is_used(loaded_engine, path, change):
    """The next read is refused, and with it the decode: no logits come of two files."""
    with (
        make_tiers(path, 2) as tiers,
        LlamaModel.open(loaded_engine, path, tiers=TierSet.of(tiers)) as model,
        model.context(n_ctx=64, n_threads=1) as context,
    ):
        decoded(context)
        context.forget()
        change(path)
        with pytest.raises(DecodeError, match="the file changed since its header was read") as caught:
            decoded(context)
        assert isinstance(caught.value.__cause__, SourceError)
        tiers.check_valid()


@pytest.mark.parametrize("change", [replace, grow, remove, overwrite_and_put_the_time_back])
@pytest.mark.parametrize("n_shards", [1, 2])
def test_before_the_engine_opens_it(loaded_engine, path, tmp_path, change, n_shards):
    """The engine refuses it with the file's path; the tiers are free again, and go on with their own file."""
    paths = split_model(path, tmp_path, n_shards) if n_shards > 1 else [path]
    with make_tiers(paths[0], 2) as tiers:
        change(paths[-1])
        with pytest.raises(ExpertierError, match=str(paths[-1].parent)):
            LlamaModel.open(loaded_engine, paths[0], tiers=TierSet.of(tiers))
        assert not tiers._usage.bound
        tiers.check_valid()


@pytest.mark.parametrize("change", [replace, grow, remove, overwrite_and_put_the_time_back])
def test_before_the_tiers_open_it(path, change):
    table = ExpertTable.from_gguf(path)
    change(path)
    with pytest.raises(SourceError, match=str(path)):
        TierManager(table, device=open_device("host"))
