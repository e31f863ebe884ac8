"""llama.cpp's own cache of experts on the fake GPUs: what `benchmarks/gpu_engine.py` measures the tiers against."""

from __future__ import annotations

import re

import numpy as np
import pytest

from engine_runs.tiered_runs import prompt_tokens, run_model, write_small_model
from expertier.engine_adapter.llama_cpp import LlamaModel
from expertier.engine_adapter.llama_cpp.generation import generate
from expertier.tiers.model.table import ExpertTable
from fake_ggml_gpu.models import logits_of
from fake_ggml_gpu.process import GpuSession, on_fake_gpus

TOKENS = 24
_SMALL_BATCHES = re.compile(r"llama_moe_cache: ubatch <= 8: hits = (\d+), misses = (\d+)")


@pytest.fixture(scope="module")
def on_cpu(loaded_engine, tmp_path_factory):
    """A model's path and its logits on the CPU."""
    path = write_small_model(tmp_path_factory.mktemp("engine_cache"), "Q8_0")
    return str(path), run_model(loaded_engine, path, None, n_ubatch=64, n_tokens=TOKENS).logits


@pytest.mark.parametrize("mapped", [True, False])
@on_fake_gpus
def test_experts_in_ram(gpus: GpuSession, on_cpu, mapped):
    """Only what is not an expert is on the device, and the logits are the CPU's."""
    path, expected = on_cpu
    device = gpus.fakes.devices[0]
    experts = ExpertTable.from_gguf(path).expert_bytes_total
    taken = {}
    for in_ram in (False, True):
        with LlamaModel.open(
            gpus.engine, path, repack=False, inner_device="FAKE0", experts_in_ram=in_ram, mapped=mapped
        ) as model:
            taken[in_ram] = device.live()["live_bytes"]
            assert logits_of(model, prompt_tokens(), TOKENS, n_ubatch=64).tobytes() == expected.tobytes()
    assert taken[False] - taken[True] >= experts


@pytest.mark.parametrize("share", [0.3, 0.6, 1.2])
@on_fake_gpus
def test_the_engines_own_cache(gpus: GpuSession, on_cpu, share):
    path, expected = on_cpu
    n_bytes = int(ExpertTable.from_gguf(path).expert_bytes_total * share)
    with LlamaModel.open(
        gpus.engine, path, repack=False, inner_device="FAKE0", experts_in_ram=True, mapped=False
    ) as model:
        gpus.engine.take_log(0)
        with model.context(n_ctx=512, n_ubatch=64, n_threads=1, moe_cache_bytes=n_bytes) as context:
            found = np.stack(generate(context, prompt_tokens(), TOKENS, keep_logits=True).logits)
        said = _SMALL_BATCHES.search(gpus.engine.take_log(0))
    assert found.tobytes() == expected.tobytes()
    assert said, "the cache says what it did when its context is freed"
    hits, misses = map(int, said.groups())
    assert hits + misses == TOKENS * 4 * 3  # top-4 in three layers
    assert hits > 0
    assert (share > 1) == (misses <= 16 * 3), "with room for all, no expert misses twice"
