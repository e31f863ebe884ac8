"""Stock llama.cpp on the fake GPUs: what the CPU makes of it, bit for bit, by the ways of a GPU."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest

from engine_runs.tiered_runs import SHAPES, prompt_tokens, run_model, write_small_model
from expertier.engine_adapter.llama_cpp import LlamaModel
from fake_ggml_gpu.models import logits_of
from fake_ggml_gpu.process import GpuSession, on_fake_gpus

TOKENS = 12
SWITCHES = {"plain": {}, "jitter": {"jitter_us": 300}, "as CUDA copies": {"pageable_at_call": 1}}


@pytest.fixture(scope="module")
def on_cpu(loaded_engine, tmp_path_factory):
    """A model's path, and its logits on the CPU of this process, by (kind, ubatch)."""
    folder = tmp_path_factory.mktemp("stock")
    found = {}

    def run(kind: str, n_ubatch: int) -> tuple[str, np.ndarray]:
        if (kind, n_ubatch) not in found:
            path = write_small_model(folder, kind)
            run = run_model(loaded_engine, path, None, n_ubatch=n_ubatch, n_tokens=TOKENS)
            found[kind, n_ubatch] = str(path), run.logits
        return found[kind, n_ubatch]

    return run


@pytest.fixture
def case(on_cpu, request):
    """The ubatch of a case, its model's path and what is expected of it."""
    kind, n_ubatch = request.param
    return n_ubatch, *on_cpu(kind, n_ubatch)


@pytest.mark.parametrize(
    ("case", "switches"),
    [
        *((case, "plain") for case in product(SHAPES, (64, 512))),
        *((("Q4_K+Q6_K", 64), switches) for switches in SWITCHES if switches != "plain"),
    ],
    indirect=["case"],
    ids=str,
)
@on_fake_gpus
def test_one_device(gpus: GpuSession, case, switches):
    n_ubatch, path, expected = case
    gpus.fakes.switch(**SWITCHES[switches])
    device = gpus.fakes.devices[0]
    before = device.counters()
    with LlamaModel.open(gpus.engine, path, repack=False, inner_device="FAKE0") as model:
        found = logits_of(model, prompt_tokens(), TOKENS, n_ubatch=n_ubatch)
    assert found.tobytes() == expected.tobytes()
    counted = {name: n - before[name] for name, n in device.counters().items()}
    assert counted["graphs"] >= TOKENS
    assert counted["async_gets"] >= TOKENS
    assert counted["bytes_to_device"] > Path(path).stat().st_size // 2, "its weights are not on the device"


@pytest.mark.parametrize("case", [("Q4_K+Q6_K", 512)], indirect=True, ids=str)
@on_fake_gpus
def test_layers_split_over_two(gpus: GpuSession, case):
    """As stock places layers where there are two devices: their streams wait for each other by events."""
    n_ubatch, path, expected = case
    gpus.fakes.switch(jitter_us=300)
    before = [device.counters() for device in gpus.fakes.devices]
    with LlamaModel.open(gpus.engine, path, repack=False) as model:
        found = logits_of(model, prompt_tokens(), TOKENS, n_ubatch=n_ubatch)
    assert found.tobytes() == expected.tobytes()
    after = [device.counters() for device in gpus.fakes.devices]
    assert all(new["graphs"] > old["graphs"] for new, old in zip(after, before, strict=True))
    assert after[0]["event_records"] > before[0]["event_records"]
