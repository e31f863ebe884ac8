"""The ledger's sizes of a context against what the engine allocates, for every architecture."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine_runs.context_sizes import measure_context
from engine_runs.tiered_runs import make_tiers
from expertier.engine_adapter.llama_cpp import LlamaModel, LoadedEngine
from expertier.engine_adapter.models.synth import write_model
from expertier.planner.budget.context_memory import ContextShape, cache_bytes, compute_bytes
from expertier.tiers.model.geometry import read_geometry
from expertier.tiers.tier_set import TierSet
from expertier.units import KIB, MIB
from model_files.architecture_models import MODELS

SHAPES = [
    ContextShape(n_ctx, n_ubatch, full_windows=True, flash_attention=flash)
    for n_ctx, n_ubatch, flash in ((1024, 512, True), (8192, 512, True), (4096, 64, True), (4096, 512, False))
]
LOGGED = MIB // 100
"""How exactly the engine says the size of a buffer; a model has three of them at most."""


@pytest.mark.parametrize("kind", MODELS)
def test_the_ledger_knows_what_the_engine_takes(
    loaded_engine: LoadedEngine, kind: str, tmp_path: Path
) -> None:
    path = write_model(tmp_path / "m.gguf", MODELS[kind], holes=True)
    geometry = read_geometry(path)
    with make_tiers(path, 1) as tiers, LlamaModel.open(loaded_engine, path, tiers=TierSet.of(tiers)) as model:
        for shape in SHAPES:
            found = measure_context(loaded_engine, model, shape)
            planned = cache_bytes(geometry, shape)
            assert abs(planned - found.cache_bytes) <= 3 * LOGGED, shape
            estimate = compute_bytes(geometry, shape)
            assert found.compute_bytes <= estimate, f"{shape}: the ledger promises memory that is not there"
            assert estimate <= 1.75 * found.compute_bytes + 256 * KIB, f"{shape}: far too much is set aside"
