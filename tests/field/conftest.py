"""An engine, models that it runs, experts without an engine, and graphs: once for each file of tests here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from engine_runs.expert_graphs import ExpertGraphs
from engine_runs.tiered_runs import SMALL
from expertier.engine_adapter.build.cache import CACHE_VARIABLE
from expertier.engine_adapter.llama_cpp import LoadedEngine
from expertier.engine_adapter.models.synth import write_model
from expertier.engine_adapter.open import open_engine, prepare_engine
from fake_ggml_gpu.process import GpuProcess, process_with_two_gpus
from model_files.gguf_files import Block, ModelFile
from model_files.gguf_files import write_model as write_blocks


@pytest.fixture(scope="module")
def engine(cache_folder: str) -> LoadedEngine:
    """The engine with our plugin."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, cache_folder)
        return open_engine()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that the engine runs."""
    return write_model(tmp_path_factory.mktemp("field") / "one.gguf", SMALL)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the same names, types and shapes as `path`, with other weights."""
    return write_model(tmp_path_factory.mktemp("field") / "two.gguf", replace(SMALL, seed=SMALL.seed + 1))


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> ModelFile:
    """Experts without an engine: in one layer a slot is one piece, in the other each matrix has an array."""
    layers = [Block(n_experts=10), Block(n_experts=6, types=("Q4_0", "Q4_0", "Q8_0"))]
    return write_blocks(tmp_path_factory.mktemp("field") / "blocks.gguf", layers)


@pytest.fixture(scope="module")
def graphs(engine: LoadedEngine, path: Path) -> ExpertGraphs:
    """Graphs over the experts of `path`, to run on the proxy."""
    assert engine.proxy
    return ExpertGraphs(path)


@pytest.fixture(scope="session")
def gpu_process(cache_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GpuProcess]:
    """A process whose engine has two fake GPUs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, cache_folder)
        with process_with_two_gpus(*prepare_engine(), tmp_path_factory.mktemp("field_gpus")) as process:
            yield process
