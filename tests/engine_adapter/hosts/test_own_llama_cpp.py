"""A llama.cpp that the user built: plugin for the folder, and the same output through the tiers. Minutes to build."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from engine_runs.tiered_runs import SMALL, prompt_tokens, write_small_model
from expertier.engine_adapter.build.locate import find_engine
from expertier.engine_adapter.build.plugin import ensure_plugin
from expertier.engine_adapter.hosts.measured_run import RunOptions, run_in_child
from servers.tool_server import EXEC, HALF_BUDGET, PROMPTS, answers, events_of

pytestmark = pytest.mark.deep


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


def test_the_stock_llama_server_answers_the_same(llama_cpp: Path, tmp_path: Path) -> None:
    model = write_small_model(tmp_path, "Q4_K+Q6_K")
    tool = llama_cpp / "build" / "bin" / "llama-server"
    expected, _ = answers(tool, "-m", model, "--no-repack")
    assert expected[0] != expected[1]
    found, server = answers(*EXEC, tool, "-m", model, env=HALF_BUDGET)
    assert found == expected
    (summary,) = events_of(server.said, "summary")
    assert int(summary["hits"]) > 0
    assert int(summary["misses"]) > 0


def test_the_stock_llama_cli_says_the_same(llama_cpp: Path, tmp_path: Path) -> None:
    model = write_small_model(tmp_path, "Q4_K+Q6_K")
    tool = llama_cpp / "build" / "bin" / "llama-cli"
    options = [
        "--temp",
        "0",
        "-n",
        "24",
        "-t",
        "1",
        "-c",
        "512",
        "--single-turn",
        "--simple-io",
        "--no-repack",
    ]

    def says(*command: object) -> tuple[str, str]:
        ended = subprocess.run(
            [*map(str, command), "-m", str(model), "-p", PROMPTS[0], *options],
            env={**os.environ, **HALF_BUDGET},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        after = ended.stdout.partition(f"> {PROMPTS[0]}\n")[2]
        return after.partition("\n\n[")[0], ended.stderr  # what follows are speeds

    expected, _ = says(tool)
    assert len(expected.split()) == 24
    found, said = says(*EXEC, tool)
    assert found == expected
    assert [len(events_of(said, event)) for event in ("enabled", "first_use", "summary")] == [1, 1, 1]


def test_the_stock_llama_bench_runs(llama_cpp: Path, tmp_path: Path) -> None:
    model = write_small_model(tmp_path, "Q8_0")
    tool = llama_cpp / "build" / "bin" / "llama-bench"
    command = [*EXEC, tool, "-m", model]
    ended = subprocess.run(
        [*map(str, command), "-p", "32", "-n", "8", "-r", "1", "-t", "1", "-o", "json"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    rows = json.loads(ended.stdout)
    assert [(row["n_prompt"], row["n_gen"]) for row in rows] == [(32, 0), (0, 8)]
    assert all(row["avg_ts"] > 0 for row in rows)
    assert [len(events_of(ended.stderr, event)) for event in ("enabled", "first_use", "summary")] == [1, 1, 1]
