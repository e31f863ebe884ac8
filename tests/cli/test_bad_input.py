"""Bad input on the command line: exit code 2, a message that says what to do, nothing left behind."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import gguf
import numpy as np
import pytest

from expertier.tiers.config.config import NOT_YET


@pytest.fixture
def folder_as_it_was(tmp_path):
    """The folder that a command works in; asserts that nothing was left in it."""
    before = sorted(tmp_path.iterdir())
    yield tmp_path
    assert sorted(path for path in tmp_path.iterdir() if path.suffix != ".gguf") == before


def dense_model(path: Path) -> Path:
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(1)
    writer.add_tensor("blk.0.ffn_up.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


COMMANDS = [["inspect"], ["run", "-p", "x"]]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_not_a_gguf(expertier, folder_as_it_was, command):
    path = folder_as_it_was / "text.gguf"
    path.write_text("not a model at all, but long enough to look at")
    expertier(*command, path).must_refuse(str(path), "not a GGUF")


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_no_such_file(expertier, tmp_path, command):
    expertier(*command, tmp_path / "nowhere.gguf").must_refuse("nowhere.gguf", "No such file")


@pytest.mark.parametrize("share", [0.0005, 0.02, 0.5, 0.99])
def test_truncated(expertier, folder_as_it_was, tiny, share):
    path = folder_as_it_was / "short.gguf"
    data = tiny.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    expertier("run", path, "-p", "x").must_refuse(str(path), "download")


def test_not_moe(expertier, folder_as_it_was):
    expertier("run", dense_model(folder_as_it_was / "dense.gguf"), "-p", "x").must_refuse("expert", "dense")


def test_budget_below_the_floor(expertier, tiny):
    expertier("run", tiny, "-p", "x", "--expert-cache-mib", "0.01").must_refuse("0.010 MiB", "at least 1")


def test_variable_that_does_not_parse(expertier, tiny):
    ended = expertier("run", tiny, "-p", "x", env={"MOE_HOST_POOL_MIB": "lots"})
    ended.must_refuse("MOE_HOST_POOL_MIB", "lots", "auto")


def test_option_that_does_not_parse(expertier, tiny):
    expertier("run", tiny, "-p", "x", "--host-pool-mib", "lots").must_refuse(
        "--host-pool-mib", "lots", "auto"
    )


def test_unknown_variable(expertier, tiny):
    expertier("run", tiny, "-p", "x", env={"MOE_HOST_POL_MIB": "4"}).must_refuse(
        "MOE_HOST_POL_MIB", "MOE_HOST_POOL_MIB"
    )


def test_variable_without_machinery(expertier, tiny):
    for name in NOT_YET[-1:]:
        expertier("run", tiny, "-p", "x", env={name: "1"}).must_refuse(name, "not available yet")


def test_no_compiler(expertier, tmp_path):
    cache = tmp_path / "cache"
    (tmp_path / "bin").mkdir()
    ended = expertier(
        "engine", "build", env={"PATH": str(tmp_path / "bin"), "CXX": "", "EXPERTIER_CACHE_DIR": str(cache)}
    )
    ended.must_refuse("compiler", "apt install g++")
    assert not cache.exists()


def test_headers_of_another_version(expertier, tmp_path, ready_cache):
    """A llama.cpp folder whose backend interface we do not know is refused before anything is compiled."""
    headers = next(Path(ready_cache, "headers").glob("xllamacpp-*"))
    source = tmp_path / "llama.cpp"
    shutil.copytree(next(path.parent.parent for path in headers.rglob("llama.h")), source)
    impl = source / "ggml" / "src" / "ggml-backend-impl.h"
    impl.write_text(
        impl.read_text().replace("#define GGML_BACKEND_API_VERSION 3", "#define GGML_BACKEND_API_VERSION 9")
    )
    libraries = source / "build" / "bin"
    libraries.mkdir(parents=True)
    for name in ("llama", "ggml", "ggml-base", "ggml-cpu"):
        subprocess.run(
            ["cc", "-shared", "-x", "c", "/dev/null", "-o", libraries / f"lib{name}.so"],
            check=True,
            timeout=120,
        )
    ended = expertier("engine", "build", "--llama-cpp", source)
    ended.must_refuse("9")


def test_no_llama_cpp_there(expertier, tmp_path):
    expertier("engine", "build", "--llama-cpp", tmp_path).must_refuse(str(tmp_path))


@pytest.mark.parametrize("nth", [pytest.param(1, marks=pytest.mark.deep), 10, 200])
def test_a_read_that_fails(expertier, tiny, nth):
    code = f"""
import errno, os
real, calls = os.preadv, 0
def preadv(descriptor, buffers, offset, flags=0):
    if flags:  # a look at the page cache, not a read
        return real(descriptor, buffers, offset, flags)
    global calls
    calls += 1
    if calls == {nth}:
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    return real(descriptor, buffers, offset)
os.preadv = preadv
"""
    ended = expertier(
        "run", tiny, "-p", "some words", "-n", 30, "-t", 1, "--expert-cache-mib", 4, "--json", code=code
    )
    ended.must_refuse("Input/output error", str(tiny), "status -3")


def test_a_prompt_without_tokens_and_a_context_too_small(expertier, tiny):
    ended = expertier("run", tiny, "-p", "some words", "-n", 30, "--ctx", 33)
    ended.must_refuse("--ctx 33 is too small for ", " prompt tokens and 30 new ones")
    assert "loading" not in ended.err, "the vocabulary is enough to know that"
