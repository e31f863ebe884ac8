"""Experts on a device of llama.cpp's own RPC server, over the loopback: a device whose addresses are no pointers."""

from __future__ import annotations

import json
import multiprocessing
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from expertier.engine_adapter.generation import generate
from expertier.engine_adapter.llama_cpp import LlamaModel
from expertier.engine_adapter.open_engine import open_engine
from expertier.engine_adapter.tiered_model import TieredModel
from expertier.errors import EngineError
from expertier.tiers.config import TierConfig
from expertier.tiers.table import ExpertTable
from tiered_runs import SMALL, prompt_tokens, write_small_model

_PATIENCE_S = 30
_POOL_BYTES = 64 << 20


@pytest.fixture(scope="module")
def server(llama_cpp: Path) -> Iterator[str]:
    tool = llama_cpp / "build" / "bin" / "ggml-rpc-server"
    if not tool.exists():
        pytest.skip(f"no {tool}: build that llama.cpp with -DGGML_RPC=ON")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [tool, "-H", "127.0.0.1", "-p", str(port), "-t", "1"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
    )
    try:
        end = time.monotonic() + _PATIENCE_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert time.monotonic() < end, "the server does not come up"
                assert process.poll() is None, "the server has ended"
                time.sleep(0.1)
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def _logits(model: LlamaModel, n_ubatch: int) -> np.ndarray:
    with model.context(n_ctx=512, n_ubatch=n_ubatch, n_threads=1) as context:
        return np.stack(generate(context, prompt_tokens(), 24, keep_logits=True).logits)


def _compare(llama_cpp: Path, server: str, path: Path) -> dict[str, int]:
    """In a process of its own: stock with everything on the server, and the tiers there."""
    engine = open_engine(llama_cpp, rpc_servers=[server])
    table = ExpertTable.from_gguf(path)
    served = {"whole": 0, "host_fills": 0, "staged": 0}
    for n_ubatch in (64, 512):
        with LlamaModel.open(engine, path, repack=False, inner_device="RPC0") as stock:
            expected = _logits(stock, n_ubatch)
        for n_slots, pool_bytes in (
            (SMALL.experts, 0),
            (SMALL.experts // 2, _POOL_BYTES),
            (SMALL.top_k, 0),
            (1, _POOL_BYTES),
        ):
            budget = sum(demand.bytes_for(n_slots) for demand in table.layer_demands())
            config = TierConfig(expert_cache_bytes=budget, host_pool_bytes=pool_bytes, engine_device="RPC0")
            with TieredModel.open(engine, table, config) as tiered:
                for _ in range(2):
                    assert (_logits(tiered.model, n_ubatch) == expected).all(), (n_ubatch, n_slots)
                tiered.tiers.check_valid()
                counters = tiered.binding.counters()
                served["whole"] += counters.whole_calls
                served["host_fills"] += counters.host_fills
                served["staged"] += counters.staged_calls
    return served


@pytest.mark.deep
def test_logits_are_those_of_stock_on_the_same_server(llama_cpp: Path, server: str, tmp_path: Path) -> None:
    path = write_small_model(tmp_path, "Q4_K+Q6_K")
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        served = process.submit(_compare, llama_cpp, server, path).result()
    assert all(served.values()), f"a way that was not taken: {served}"


@pytest.mark.deep
def test_run_on_a_server(llama_cpp: Path, server: str, tmp_path: Path) -> None:
    path = write_small_model(tmp_path, "Q4_K+Q6_K")
    command = [
        sys.executable, "-m", "expertier", "run", path, "--prompt", "some words", "-n", "8", "--json",
        "--llama-cpp", llama_cpp,
    ]  # fmt: skip
    local = subprocess.run(command, capture_output=True, text=True, check=True)
    remote = subprocess.run([*command, "--rpc", server], capture_output=True, text=True, check=True)
    assert "of the device" in remote.stderr, "the ledger is of a device with memory of its own"
    assert json.loads(remote.stdout)["text"] == json.loads(local.stdout)["text"]


def _refused(llama_cpp: Path | None, endpoint: str) -> str:
    try:
        open_engine(llama_cpp, rpc_servers=[endpoint])
    except EngineError as error:
        return str(error)
    return ""


def test_an_engine_without_rpc_says_how_to_build_one() -> None:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        assert "-DGGML_RPC=ON" in process.submit(_refused, None, "127.0.0.1:1").result()


@pytest.mark.deep
def test_a_server_that_is_not_there_is_named(llama_cpp: Path) -> None:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        assert "127.0.0.1:1" in process.submit(_refused, llama_cpp, "127.0.0.1:1").result()
