"""A llama.cpp that the user built: plugin for the folder, and the same output through the tiers. Minutes to build."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest

from expertier.engine_adapter.build.locate import find_engine
from expertier.engine_adapter.build.pins import XLLAMACPP
from expertier.engine_adapter.build.plugin import ensure_plugin
from expertier.engine_adapter.measured_run import RunOptions, run_in_child
from tiered_runs import SMALL, prompt_tokens, write_small_model

pytestmark = pytest.mark.deep

CONFIGURE = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=ON",
    "-DLLAMA_BUILD_COMMON=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_TOOLS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_SERVER=OFF",
)


@pytest.fixture(scope="module")
def llama_cpp(engine_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The released source, built as a user would; kept in the cache folder between runs."""
    kept = engine_cache / "test-builds" / f"llama.cpp-{XLLAMACPP.version}"
    if kept.exists():
        return kept
    if shutil.which("cmake") is None:
        pytest.skip("no cmake to build llama.cpp with: apt install cmake")
    folder = tmp_path_factory.mktemp("source")
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", XLLAMACPP.package]
    subprocess.run([*pip, XLLAMACPP.requirement, "-d", folder], check=True)
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    source = next(folder.glob(f"*/{XLLAMACPP.header_root}"))
    subprocess.run(["cmake", "-B", source / "build", "-S", source, *CONFIGURE], check=True)
    jobs = str(len(os.sched_getaffinity(0)))
    subprocess.run(["cmake", "--build", source / "build", "--target", "llama", "-j", jobs], check=True)
    kept.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(source, kept)
    return kept


@pytest.mark.parametrize("slots", [1, SMALL.experts // 2])
def test_parity_on_a_llama_cpp_of_ones_own(llama_cpp: Path, tmp_path: Path, slots: int) -> None:
    plugin = ensure_plugin(find_engine(llama_cpp))
    assert plugin.info.package == "llama.cpp"
    model = write_small_model(tmp_path, "Q4_K+Q6_K")
    stock = RunOptions(
        model=str(model),
        prompt=prompt_tokens(),
        n_tokens=64,
        n_threads=2,
        llama_cpp=str(llama_cpp),
        logits_path=str(tmp_path / "stock.npy"),
    )
    budget = SMALL.layers * (slots * (SMALL.expert_bytes + 8192) + 4096)
    tiers = dataclasses.replace(
        stock, tiers=True, expert_cache_bytes=budget, logits_path=str(tmp_path / "tiers.npy")
    )
    expected, found = run_in_child(stock), run_in_child(tiers)
    assert found.tokens == expected.tokens
    assert np.load(tmp_path / "stock.npy").tobytes() == np.load(tmp_path / "tiers.npy").tobytes()
    assert found.load["expert_bytes"] == 0
    assert found.n_graph_splits == expected.n_graph_splits == 1
    assert found.flash_attention
