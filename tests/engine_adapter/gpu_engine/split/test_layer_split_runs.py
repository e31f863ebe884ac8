"""Contexts, drafts, servers and recordings over layers on two devices: each as if it were on one."""

from __future__ import annotations

import ctypes as ct
import json
import urllib.request
from contextlib import ExitStack, suppress

import numpy as np
import pytest
from typer.testing import CliRunner

from engine_runs.tiered_runs import SMALL, prompt_tokens
from expertier.cli import app as cli
from expertier.engine_adapter.binding.lookup_log import LookupLog
from expertier.engine_adapter.hosts.server.server import ServerOptions, TieredServer, _only_ours
from expertier.engine_adapter.placement.placement import Placement
from expertier.engine_adapter.tiered_model import TieredModel
from expertier.errors import ConfigError
from expertier.tiers.config.config import TierConfig
from expertier.tiers.model.table import ExpertTable
from fake_ggml_gpu.models import assert_same, gpu_model, gpu_tiers, logits_in, logits_of, stock_logits
from fake_ggml_gpu.process import GpuSession, on_fake_gpus
from fake_ggml_gpu.split_models import (
    BOTH,
    cut,
    split_model,
    split_path,
    split_tiers,
    stock_split_logits,
)
from limits.at_once import run_at_once

PROMPTS = [prompt_tokens(40), prompt_tokens(40)[::-1]]
TOKENS = 8
SMALL_POOL_BYTES = 3 << 20
_GPU = 1  # GGML_BACKEND_DEVICE_TYPE_GPU


def budget(table: ExpertTable, n_slots: int) -> int:
    return sum(demand.bytes_for(n_slots) for demand in table.layer_demands())


@pytest.mark.parametrize(
    ("n_slots", "stream_tokens"),
    [(3, 0), (SMALL.top_k, "auto"), pytest.param(SMALL.experts, "auto", marks=pytest.mark.deep)],
)
@on_fake_gpus
def test_two_contexts_at_once(gpus: GpuSession, n_slots, stream_tokens):
    path = split_path(gpus, "qwen3moe")
    expected = [stock_split_logits(gpus, path, prompt, TOKENS) for prompt in PROMPTS]
    gpus.fakes.switch(jitter_us=200, seed=n_slots)
    placement = cut(path, 2)
    with (
        split_tiers(
            gpus, path, n_slots, placement, host_pool_bytes=SMALL_POOL_BYTES, stream_tokens=stream_tokens
        ) as tiers,
        split_model(gpus, tiers, placement) as model,
    ):

        def job(i: int) -> None:
            for _ in range(2):
                assert_same(logits_of(model, PROMPTS[i], TOKENS), expected[i])

        run_at_once([lambda i=i: job(i) for i in range(2)])


@on_fake_gpus
def test_wide_then_short_batches(gpus: GpuSession):
    path = split_path(gpus, "gpt-oss")
    prompts = [prompt_tokens(n) for n in (200, 1, 31, 5, 200)]
    expected = [stock_split_logits(gpus, path, prompt, 3, n_ubatch=128) for prompt in prompts]
    placement = cut(path, 3)
    with (
        split_tiers(gpus, path, 5, placement, host_pool_bytes=SMALL_POOL_BYTES) as tiers,
        split_model(gpus, tiers, placement) as model,
        model.context(n_ctx=512, n_ubatch=128, n_threads=1) as context,
    ):
        for prompt, logits in zip(prompts, expected, strict=True):
            assert_same(logits_in(context, prompt, 3), logits)


@pytest.mark.parametrize("draft_on", ["FAKE1", BOTH])
@on_fake_gpus
def test_a_draft_beside_the_main_model(gpus: GpuSession, draft_on):
    """Each model has its own tiers, on one device or on both; both run at once and share the budget of host memory."""
    paths = [split_path(gpus, kind) for kind in ("qwen3moe", "llama")]
    expected = [
        stock_split_logits(gpus, paths[0], PROMPTS[0], TOKENS),
        stock_logits(gpus, paths[1], PROMPTS[1], TOKENS),
    ]
    gpus.fakes.switch(jitter_us=200)
    main, draft = cut(paths[0], 2), cut(paths[1], 3)
    with ExitStack() as stack:
        tiers = stack.enter_context(split_tiers(gpus, paths[0], 4, main, host_pool_bytes=SMALL_POOL_BYTES))
        models = [stack.enter_context(split_model(gpus, tiers, main))]
        if draft_on == BOTH:
            own = stack.enter_context(split_tiers(gpus, paths[1], 3, draft, host_pool_bytes=SMALL_POOL_BYTES))
            models.append(stack.enter_context(split_model(gpus, own, draft)))
        else:
            alone = gpu_tiers(gpus, paths[1], 3, host_pool_bytes=SMALL_POOL_BYTES, device=draft_on)
            models.append(stack.enter_context(gpu_model(gpus, stack.enter_context(alone), device=draft_on)))
        run_at_once(
            [lambda i=i: assert_same(logits_of(models[i], PROMPTS[i], TOKENS), expected[i]) for i in range(2)]
        )


@on_fake_gpus
def test_a_recording_is_the_one_of_a_single_device(gpus: GpuSession):
    table = ExpertTable.from_gguf(split_path(gpus, "qwen3moe"))
    recorded, described = [], []
    for device, shares in (("FAKE0", "auto"), (BOTH, (2.0, 4.0))):
        log = LookupLog()
        config = TierConfig(
            expert_cache_bytes=budget(table, 5), engine_device=device, tensor_split=shares, stream_tokens=0
        )
        with TieredModel.open(gpus.engine, table, config, lookups=log) as opened:
            opened.generate(PROMPTS[0], TOKENS, n_ctx=128, n_threads=1)
            recorded.append(log.take())
            described.append(opened.describe())
    assert recorded[0] == recorded[1]
    assert {lookup.layer for lookup in recorded[1]} == set(range(table.n_layers))
    one, two = described
    assert one["l1"]["misses"] == two["l1"]["misses"]
    assert one["l1"]["slots"] == two["l1"]["slots"]
    assert one["proxy"]["lookups"] == two["proxy"]["lookups"]
    assert "devices" not in one
    assert [(each["device"], each["layers"]) for each in two["devices"]] == [("FAKE0", 2), ("FAKE1", 3)]
    assert sum(each["l1"]["misses"] for each in two["devices"]) == two["l1"]["misses"]


@on_fake_gpus
def test_the_command_on_both(gpus: GpuSession):
    """`expertier run --device FAKE0,FAKE1`: its events, its document, and what it prints for a person."""
    path = split_path(gpus, "qwen3moe")
    texts = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli, "open_engine", lambda *_, **__: gpus.engine)
        for options in (
            ["--device", "FAKE1"],
            ["--device", BOTH, "--tensor-split", "4,2"],
            ["--device", BOTH],
        ):
            command = [
                "run",
                str(path),
                "-p",
                "of two",
                "-n",
                "4",
                "--expert-cache-mib",
                "5",
                "--threads",
                "1",
            ]
            ran = CliRunner().invoke(cli.app, [*command, *options, "--json"])
            assert ran.exit_code == 0, ran.output
            document = json.loads(ran.stdout.splitlines()[-1])
            texts.append(document["text"])
        assert [each["layers"] for each in document["devices"]] == [3, 2]
        assert sum(each["l1"]["hits"] for each in document["devices"]) == document["l1"]["hits"] > 0
        shown = CliRunner().invoke(cli.app, [*command, "--device", BOTH])
    assert texts[0] == texts[1] == texts[2]
    assert "event=enabled" in shown.stderr
    assert " devices=2 " in shown.stderr
    assert "FAKE0: 3 layers, " in shown.stderr
    assert "FAKE1: 2 layers, " in shown.stderr


@on_fake_gpus
def test_a_load_that_names_no_devices_finds_ours_alone(gpus: GpuSession):
    """All other devices call themselves integrated GPUs meanwhile, which llama.cpp leaves out where it finds a GPU."""
    assert gpus.engine.proxy
    kind = gpus.engine.symbol("ggml_backend_dev_type", ct.c_int, ct.c_void_p)
    find = gpus.engine.symbol("ggml_backend_dev_by_name", ct.c_void_p, ct.c_char_p)
    names = [device["name"] for device in gpus.engine.devices()]

    def gpus_now() -> list[str]:
        return [name for name in names if kind(find(name.encode())) == _GPU]

    before = gpus_now()
    assert set(before) == {"FAKE0", "FAKE1", "TIER_FAKE0", "TIER_FAKE1", "TIER_CPU"}, before
    for shown in (("FAKE0", "FAKE1"), ("FAKE1",)):
        with suppress(KeyError), _only_ours(gpus.engine, Placement((*shown, "FAKE0")[:2], (3, 3))):
            assert gpus_now() == sorted({f"TIER_{name}" for name in (*shown, "FAKE0")[:2]})
            raise KeyError
        assert gpus_now() == before


@on_fake_gpus
def test_the_server_on_both(gpus: GpuSession):
    """The wheel's server is given no devices: it finds the placement's devices alone; afterwards all GPUs are back."""
    table = ExpertTable.from_gguf(split_path(gpus, "qwen3moe"))
    before = [device["name"] for device in gpus.engine.devices()]
    answers = []
    for device in ("FAKE0", BOTH):
        config = TierConfig(expert_cache_bytes=budget(table, 5), engine_device=device)
        options = ServerOptions(port=0, n_ctx=256, n_threads=1)
        with TieredServer.start(gpus.engine, table, config, options) as server:
            asked = {"prompt": PROMPTS[0], "n_predict": TOKENS, "temperature": 0, "return_tokens": True}
            request = urllib.request.Request(
                f"{server.url}/completion", json.dumps(asked).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=60) as answer:
                answers.append(json.load(answer)["tokens"])
            assert all(each.counters().graphs > TOKENS for each in server.binding.bindings)
            assert server.tiers.stats().l1.misses > 0
    assert answers[0] == answers[1]
    assert len(answers[1]) == TOKENS
    assert [device["name"] for device in gpus.engine.devices()] == before
    expected = stock_split_logits(gpus, table.path, PROMPTS[1], 2)
    assert np.isfinite(expected).all(), "stock models find the real devices again"
    with pytest.raises(ConfigError, match="in the engine's order; give FAKE0,FAKE1"):
        TieredServer.start(gpus.engine, table, TierConfig(engine_device="FAKE1,FAKE0"), ServerOptions(port=0))
