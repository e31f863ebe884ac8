"""Parity on every architecture with experts that the engine knows, on models of the engine's own generator."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest

from expertier.engine_adapter.build.engine import Engine
from expertier.engine_adapter.build.pins import XLLAMACPP
from expertier.engine_adapter.build.plugin import Plugin
from model_files.generated_models import Outcome, Setup, build_generator, generate, try_model

REFUSED = {
    "ernie4_5": "NotMoeError",  # the generator calls them mixtures, and gives them no experts
    "paddleocr": "NotMoeError",
}
"""By architecture: the error with which its model is refused."""

UNUSED = {"refact"}
"""Whose experts the engine loads, and leaves out of its graph."""

_LIMIT_S = 300.0  # for one model


@pytest.mark.deep
def test_every_architecture_of_the_engine(
    engine: Engine, plugin: Plugin, engine_cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generator = build_generator(XLLAMACPP, engine.libraries, engine_cache / "test-builds")
    models = generate(generator, engine.libraries, tmp_path)
    assert len(models) > 50
    outcomes = try_all(Setup(engine.libraries, plugin.proxy_path, plugin.host_path), models)
    refused = {name: found.refusal for name, found in outcomes.items() if found.refusal}
    wrong = {name: found.wrong for name, found in outcomes.items() if found.wrong}
    with capsys.disabled():
        print(
            f"\n{len(outcomes)} architectures, {len(outcomes) - len(refused) - len(wrong)} bit-identical to stock"
        )
        for name, why in (refused | wrong).items():
            print(f"  {name}: {why}")
    assert not wrong
    assert {name: why.split(":")[0] for name, why in refused.items()} == REFUSED
    tried = [found.slots for name, found in outcomes.items() if name not in refused]
    assert all(slots[0] == 1 and len(slots) > 1 for slots in tried)
    assert {name for name, found in outcomes.items() if not found.uses_experts} == UNUSED


def try_all(setup: Setup, models: list[Path]) -> dict[str, Outcome]:
    """Try each in a process of its own kind: an assertion of the engine ends that, and its model is named."""
    outcomes = {}
    pool: ProcessPoolExecutor | None = None
    try:
        for path in models:
            pool = pool or ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
            name = path.stem.removesuffix("-moe")
            try:
                outcomes[name] = pool.submit(try_model, setup, path).result(_LIMIT_S)
            except BrokenProcessPool:
                outcomes[name] = Outcome(wrong=("the process ended",))
                pool = None
            path.unlink()
    finally:
        if pool is not None:
            pool.shutdown()
    return outcomes
