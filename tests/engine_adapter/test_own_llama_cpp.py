"""A llama.cpp that the user built: plugin for the folder, and the same output through the tiers. Minutes to build."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time
import urllib.request
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
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_WEBUI=OFF",
)
TARGETS = ("llama", "llama-server", "llama-bench")


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
    subprocess.run(["cmake", "--build", source / "build", "--target", *TARGETS, "-j", jobs], check=True)
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


class Server:
    """A llama-server on a free port of the loopback, until the block ends."""

    def __init__(self, *command: object, env: dict[str, str]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{free.getsockname()[1]}"
        port = self.url.rsplit(":", 1)[1]
        arguments = [*map(str, command), "--host", "127.0.0.1", "--port", port, "-t", "1", "-c", "512"]
        self.process = subprocess.Popen(
            arguments, env={**os.environ, **env}, stderr=subprocess.PIPE, text=True
        )
        self.said = ""

    def __enter__(self) -> Server:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return self
            except OSError:
                time.sleep(0.2)  # until the server listens: there is nothing to wait on
        self.__exit__()
        raise AssertionError(f"the server did not come up: {self.said}")

    def complete(self, prompt: str) -> str:
        body = json.dumps(
            {"prompt": prompt, "n_predict": 32, "temperature": 0, "cache_prompt": False}
        ).encode()
        request = urllib.request.Request(f"{self.url}/completion", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            return str(json.load(answer)["content"])

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGINT)
        _, self.said = self.process.communicate(timeout=60)


def test_the_stock_llama_server_answers_the_same(llama_cpp: Path, tmp_path: Path) -> None:
    model = write_small_model(tmp_path, "Q4_K+Q6_K")
    tool = llama_cpp / "build" / "bin" / "llama-server"
    prompts = ["some words to go on from", "another text", "some words to go on from"]
    with Server(tool, "-m", model, "--no-repack", env={}) as stock:
        expected = [stock.complete(prompt) for prompt in prompts]
    assert expected[0] == expected[2] != expected[1]
    budget = SMALL.expert_bytes_total / 2**20 / 2
    ours = (sys.executable, "-m", "expertier", "exec", "--", tool, "-m", model)
    with Server(*ours, env={"MOE_EXPERT_CACHE_MIB": f"{budget:.3f}"}) as tiers:
        assert [tiers.complete(prompt) for prompt in prompts] == expected
    assert tiers.process.returncode == 0, tiers.said
    hits = re.search(r"L1 (\d+) hits, (\d+) misses", tiers.said)
    assert hits is not None, tiers.said
    assert int(hits[1]) > 0
    assert int(hits[2]) > 0


def test_the_stock_llama_bench_runs(llama_cpp: Path, tmp_path: Path) -> None:
    model = write_small_model(tmp_path, "Q8_0")
    tool = llama_cpp / "build" / "bin" / "llama-bench"
    command = [sys.executable, "-m", "expertier", "exec", "--", tool, "-m", model]
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
