"""Experts on a device of llama.cpp's own RPC server, over the loopback: a device whose addresses are no pointers."""

from __future__ import annotations

import json
import multiprocessing
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from engine_runs.rpc_runs import compare, refused
from engine_runs.tiered_runs import write_small_model
from limits.waits import PATIENCE_S, child_process, wait_until_listening


@pytest.fixture(scope="module")
def server(llama_cpp: Path) -> Iterator[str]:
    tool = llama_cpp / "build" / "bin" / "ggml-rpc-server"
    if not tool.exists():
        pytest.skip(f"no {tool}: build that llama.cpp with -DGGML_RPC=ON")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = (tool, "-H", "127.0.0.1", "-p", port, "-t", "1")
    with child_process(
        *command, limit_s=3600, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT
    ) as process:
        wait_until_listening(process, port)
        yield f"127.0.0.1:{port}"


@pytest.mark.deep
def test_logits_are_those_of_stock_on_the_same_server(llama_cpp: Path, server: str, tmp_path: Path) -> None:
    path = write_small_model(tmp_path, "Q4_K+Q6_K")
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        served = process.submit(compare, llama_cpp, server, path).result(PATIENCE_S)
    assert all(served.values()), f"a way that was not taken: {served}"


@pytest.mark.deep
def test_run_on_a_server(llama_cpp: Path, server: str, tmp_path: Path) -> None:
    path = write_small_model(tmp_path, "Q4_K+Q6_K")
    command = [
        sys.executable, "-m", "expertier", "run", path, "--prompt", "some words", "-n", "8", "--json",
        "--llama-cpp", llama_cpp,
    ]  # fmt: skip
    local = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    remote = subprocess.run(
        [*command, "--rpc", server], capture_output=True, text=True, check=True, timeout=120
    )
    assert "of the device" in remote.stderr, "the ledger is of a device with memory of its own"
    assert json.loads(remote.stdout)["text"] == json.loads(local.stdout)["text"]


def test_an_engine_without_rpc_says_how_to_build_one() -> None:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        assert "-DGGML_RPC=ON" in process.submit(refused, None, "127.0.0.1:1").result(PATIENCE_S)


@pytest.mark.deep
def test_a_server_that_is_not_there_is_named(llama_cpp: Path) -> None:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        assert "127.0.0.1:1" in process.submit(refused, llama_cpp, "127.0.0.1:1").result(PATIENCE_S)
