"""Fixtures for everything that needs the engine for real: one cache folder for the whole test run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_runs.tiered_runs import write_small_model
from expertier.engine_adapter.build.cache import CACHE_VARIABLE
from expertier.engine_adapter.build.engine import Engine
from expertier.engine_adapter.build.locate import find_engine
from expertier.engine_adapter.build.pins import XLLAMACPP
from expertier.engine_adapter.build.plugin import Plugin, ensure_plugin
from expertier.engine_adapter.llama_cpp import LoadedEngine
from failures.failing_reads import FailingReads

_CONFIGURE = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=ON",
    "-DGGML_RPC=ON",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_WEBUI=OFF",
)
TOOLS = ("llama-server", "llama-cli", "llama-bench", "ggml-rpc-server")


@pytest.fixture(scope="session")
def engine_cache(cache_folder: str) -> Iterator[Path]:
    """The cache folder with the real headers and plugin, set for this process and its children."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, cache_folder)
        yield Path(cache_folder)


@pytest.fixture(scope="session")
def engine() -> Engine:
    """The installed engine wheel."""
    return find_engine()


@pytest.fixture(scope="session")
def plugin(engine: Engine, engine_cache: Path) -> Plugin:
    """The plugin for the installed engine, built the first time."""
    assert engine_cache
    return ensure_plugin(engine)


@pytest.fixture(scope="session")
def loaded_engine(engine: Engine, plugin: Plugin) -> LoadedEngine:
    """The engine with our plugin, loaded into this process."""
    return LoadedEngine.load(engine.libraries, plugin.proxy_path, plugin.host_path)


@pytest.fixture(scope="session")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model of Q4_K and Q6_K matrices, which no test changes."""
    return write_small_model(tmp_path_factory.mktemp("small"), "Q4_K+Q6_K")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> FailingReads:
    """The reads of experts, which can be counted and made to fail."""
    return FailingReads(monkeypatch)


@pytest.fixture(scope="session")
def llama_cpp(engine_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The released source, built as a user would and kept in the cache folder; or EXPERTIER_TEST_LLAMA_CPP."""
    if named := os.environ.get("EXPERTIER_TEST_LLAMA_CPP"):
        return Path(named)
    kept = engine_cache / "test-builds" / f"llama.cpp-{XLLAMACPP.version}"
    if all((kept / "build" / "bin" / tool).exists() for tool in TOOLS):
        return kept
    if shutil.which("cmake") is None:
        pytest.skip("no cmake to build llama.cpp with: apt install cmake")
    folder = tmp_path_factory.mktemp("source")
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", XLLAMACPP.package]
    subprocess.run([*pip, XLLAMACPP.requirement, "-d", folder], check=True, timeout=600)
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    source = next(folder.glob(f"*/{XLLAMACPP.header_root}"))
    subprocess.run(["cmake", "-B", source / "build", "-S", source, *_CONFIGURE], check=True, timeout=600)
    jobs = str(len(os.sched_getaffinity(0)))
    subprocess.run(
        ["cmake", "--build", source / "build", "--target", "llama", *TOOLS, "-j", jobs],
        check=True,
        timeout=3600,
    )
    kept.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(kept, ignore_errors=True)
    shutil.move(source, kept)
    return kept
