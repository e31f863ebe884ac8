"""The drop-in over the real llama-cpp-python, which is compiled once and kept in the cache folder.

Each test runs a scenario of `engine_runs.drop_in` in a process of its own, as one process can have one engine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from expertier.engine_adapter.build.pins import LLAMA_CPP_PYTHON


@pytest.fixture(scope="module")
def site(engine_cache: Path) -> Path:
    """The real package, compiled as pip does it, in a folder of the cache; minutes the first time."""
    kept = engine_cache / "test-builds" / f"llama-cpp-python-{LLAMA_CPP_PYTHON.version}"
    if kept.exists():
        return kept
    fresh = kept.with_name(f"{kept.name}.tmp")
    needs = ["diskcache", "jinja2", "markupsafe", "typing-extensions"]
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--upgrade", "--target", fresh]
    subprocess.run(
        [*pip, LLAMA_CPP_PYTHON.requirement, *needs],
        env={**os.environ, "CMAKE_ARGS": "-DLLAVA_BUILD=OFF"},
        check=True,
        timeout=3600,
    )
    fresh.rename(kept)
    return kept


def run_scenario(site: Path, scenario: str, folder: Path, **options: Any) -> tuple[dict[str, Any], str]:
    """Run a scenario of `engine_runs.drop_in` on the real package; return its result and standard error."""
    support = Path(__file__).parents[3] / "support"
    ended = subprocess.run(
        [sys.executable, "-m", "engine_runs.drop_in", scenario, folder, json.dumps(options)],
        env={**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{support}"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    said: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return said, ended.stderr


@pytest.mark.deep
@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_K+Q6_K"])
def test_the_output_is_that_of_stock(site: Path, tmp_path: Path, kind: str) -> None:
    said, _ = run_scenario(site, "parity", tmp_path, kind=kind)
    assert set(said) == {"one", "below top-k", "top-k", "half", "all"}
    for slots, found in said.items():
        assert found["logits"], f"other logits with {slots} slots"
        assert found["completion"], f"another completion with {slots} slots"
        assert found["chat"], f"another answer with {slots} slots"
        assert found["stream"], f"another stream with {slots} slots"
        assert found["stock_after"], "another stock model once the proxy is there"
        assert found["expert_bytes_read"] == 0
        assert found["expert_bytes_skipped"] > 0
        assert found["hits"] > 0 or slots in ("one", "all"), "with a slot for each, nobody asks any more"
        assert found["pass_calls"] > 0 or slots == "all"


@pytest.mark.deep
@pytest.mark.parametrize(
    ("scenario", "options"),
    [
        pytest.param("states", {}, id="states and resets"),
        pytest.param("two_models", {}, id="two models in one process"),
        pytest.param("failed_reads", {"architecture": "qwen3moe"}, id="failed reads"),
        pytest.param("failed_reads", {"architecture": "nemotron_h_moe"}, id="failed reads, recurrent layers"),
        pytest.param("interrupted", {}, id="Ctrl-C in a batch"),
        pytest.param("freed", {}, id="all that is freed"),
        pytest.param("errors", {}, id="errors"),
    ],
)
def test_every_finding_of_a_scenario_is_right(
    site: Path, tmp_path: Path, scenario: str, options: dict[str, str]
) -> None:
    said, _ = run_scenario(site, scenario, tmp_path, **options)
    assert said
    assert all(said.values()), said


@pytest.mark.deep
def test_the_end_of_a_process_with_a_model_open_is_quiet(site: Path, tmp_path: Path) -> None:
    said, stderr = run_scenario(site, "left_open", tmp_path)
    assert said["text"]
    assert "Traceback" not in stderr
    assert "ignored" not in stderr


@pytest.mark.deep
@pytest.mark.parametrize("verbose", [False, True])
def test_what_is_printed(site: Path, tmp_path: Path, verbose: bool) -> None:
    _, stderr = run_scenario(site, "left_open", tmp_path, verbose=verbose)
    assert ("llama_model_loader" in stderr) is verbose
    assert ("load_tensors" in stderr) is verbose
    assert "load_backend" not in stderr
