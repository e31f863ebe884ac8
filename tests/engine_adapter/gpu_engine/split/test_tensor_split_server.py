"""The wheel's llama-server over devices that share every tensor: told of no devices, it finds shards by a name."""

from __future__ import annotations

import json
import threading
import urllib.request
from dataclasses import replace

import pytest

from engine_runs.tiered_runs import SMALL, prompt_tokens
from expertier.engine_adapter.hosts.server.server import ServerOptions, TieredServer
from expertier.engine_adapter.llama_cpp import LlamaModel
from expertier.errors import ConfigError
from expertier.tiers.model.table import ExpertTable
from fake_ggml_gpu.models import model_path
from fake_ggml_gpu.process import GpuSession, on_fake_gpus
from fake_ggml_gpu.tensor_models import BOTH, stock_tensor_logits, tensor_config
from limits.waits import joined
from model_files.architecture_models import MODELS

PROMPTS = [prompt_tokens(40), prompt_tokens(40)[::-1]]
TOKENS = 8
POOL = 64 << 20


def path_of(gpus: GpuSession):
    return model_path(gpus, "qwen3moe, 512", replace(MODELS["qwen3moe"], n_ff=512))


def greedy_tokens(gpus: GpuSession, path, prompt) -> list[int]:
    """What stock with --split-mode tensor goes on with."""
    rows = stock_tensor_logits(gpus, path, prompt, TOKENS)[len(prompt) - 1 :]
    return rows.argmax(axis=1).tolist()[:TOKENS]


def complete(url: str, prompt: list[int]) -> list[int]:
    asked = {"prompt": prompt, "n_predict": TOKENS, "temperature": 0, "return_tokens": True}
    request = urllib.request.Request(
        f"{url}/completion", json.dumps(asked).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return list(json.load(answer)["tokens"])


def only_stocks_faults(gpus: GpuSession) -> None:
    """The server clears the cache after a trial whose output it does not read, and waits for none of its devices.

    Under ggml's Meta backend only, and without us as well: the trial's rows are hidden by then.
    """
    faults = gpus.fakes.take_faults().splitlines()
    others = [line for line in faults if "clear on the host" not in line or "SET_ROWS cache_" not in line]
    assert not others, others


@pytest.mark.parametrize(
    ("n_slots", "pool"), [(SMALL.top_k, POOL), (SMALL.experts // 2, 0), (SMALL.experts, 0)]
)
@on_fake_gpus
def test_answers_are_those_of_stock(gpus: GpuSession, n_slots, pool):
    path = path_of(gpus)
    expected = [greedy_tokens(gpus, path, prompt) for prompt in PROMPTS]
    assert gpus.engine.proxy  # ours are among the devices from now on
    before = [device["name"] for device in gpus.engine.devices()]
    config = tensor_config(path, n_slots, host_pool_bytes=pool)
    options = ServerOptions(port=0, n_ctx=256, n_threads=1, n_parallel=2)
    with TieredServer.start(gpus.engine, ExpertTable.from_gguf(path), config, options) as server:
        assert server.tiers.split_source is not None
        for _ in range(2):
            assert [complete(server.url, prompt) for prompt in PROMPTS] == expected
        found: dict[int, list[int]] = {}
        threads = [
            threading.Thread(
                target=lambda i=i: found.update({i: complete(server.url, PROMPTS[i])}), daemon=True
            )
            for i in range(2)
        ]
        for thread in threads:
            thread.start()
        joined(*threads)
        assert sorted(map(len, found.values())) == [TOKENS] * 2, "both at once are answered, too"
        assert all(each.counters().graphs > TOKENS for each in server.binding.bindings)
        if n_slots < SMALL.experts:
            misses = [manager.stats().l1.misses for manager in server.tiers.managers]
            assert all(misses), ([each.counters() for each in server.binding.bindings], misses)
    only_stocks_faults(gpus)
    after = [device["name"] for device in gpus.engine.devices()]
    assert after == before, (after, before)
    assert greedy_tokens(gpus, path, PROMPTS[0][:20]), "stock finds the real devices again"
    with LlamaModel.open(gpus.engine, path, repack=False, inner_device="FAKE0") as model:
        assert model.n_vocab == SMALL.vocab


@on_fake_gpus
def test_shares_and_the_order_of_devices(gpus: GpuSession):
    path = model_path(gpus, "gpt-oss, 512", replace(MODELS["gpt-oss"], n_ff=512))
    table = ExpertTable.from_gguf(path)
    options = ServerOptions(port=0, n_ctx=128, n_threads=1)
    uneven = tensor_config(path, 8, tensor_split=(3.0, 1.0))
    with TieredServer.start(gpus.engine, table, uneven, options) as server:
        first, second = (manager.table.expert_bytes_total for manager in server.tiers.managers)
        assert first > 2 * second
        assert len(complete(server.url, PROMPTS[0])) == TOKENS
    only_stocks_faults(gpus)
    backwards = replace(tensor_config(path, 8), engine_device=",".join(reversed(BOTH.split(","))))
    with pytest.raises(ConfigError, match="in the engine's order; give FAKE0,FAKE1"):
        TieredServer.start(gpus.engine, table, backwards, options)
