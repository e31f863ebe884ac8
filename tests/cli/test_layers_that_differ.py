"""Layers that use different numbers of experts, of different widths: what the command line says of such a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from expertier.cli.app import app
from expertier.engine_adapter.models.synth import write_model
from model_files.architecture_models import MODELS

SHAPE = MODELS["nemotron_h_moe, puzzle"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("differ") / "m.gguf", SHAPE, holes=True)


def run(*arguments: object) -> str:
    done = CliRunner().invoke(app, [str(each) for each in arguments], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.exception
    return done.stdout


def test_inspect(model: Path) -> None:
    document = json.loads(run("inspect", model, "--json"))
    assert document["top_k"] == 4
    assert [layer["top_k"] for layer in document["per_layer"]] == [2, 4, 1]
    assert [layer["expert_bytes"] for layer in document["per_layer"]] == [
        SHAPE._expert_bytes(layer) for layer in range(3)
    ]
    shown = run("inspect", model)
    assert "experts used a token  1 to 4" in shown
    assert [line.split()[:3] for line in shown.splitlines() if line.strip().startswith("blk.")] == [
        ["blk.1", "16", "2"],
        ["blk.3", "16", "4"],
        ["blk.5", "16", "1"],
    ]


def test_plan(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXPERTIER_CACHE_DIR", str(tmp_path))
    document = json.loads(run("plan", model, "--ram", "8GiB", "--expert-cache-mib", "2", "--json"))
    assert document["top_k"] == 4
    assert document["experts_used"] == [2, 4, 1]
    slots = document["slots"]
    assert document["below_top_k"] == [
        i for i, (n, used) in enumerate(zip(slots, [2, 4, 1], strict=True)) if n < used
    ]
