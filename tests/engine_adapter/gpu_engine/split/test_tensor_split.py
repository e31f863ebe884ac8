"""Tensor split over two fake GPUs: stock's logits bit for bit, shards as slots, every expert read once."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from engine_runs.tiered_runs import prompt_tokens
from expertier.engine_adapter.llama_cpp.shard_tiers import open_shard_tiers
from expertier.engine_adapter.placement.tensor_split import ask_tensor_split
from expertier.engine_adapter.tiered_model import TieredModel
from expertier.errors import (
    BudgetError,
    ConfigError,
    DecodeError,
    EngineError,
    SourceError,
    UnsupportedLayoutError,
)
from expertier.hip.faults.plan import FaultPlan
from expertier.tiers import tier_set
from expertier.tiers.file.source import FileSource
from expertier.tiers.model.table import ExpertTable
from fake_ggml_gpu.models import assert_same, logits_of, model_path
from fake_ggml_gpu.process import GpuSession, on_fake_gpus
from fake_ggml_gpu.tensor_models import (
    BOTH,
    shards_of,
    stock_tensor_logits,
    tensor_config,
    tensor_model,
)
from model_files.architecture_models import MODELS, UNUSED_LAYERS

PREFILL, DECODE = 80, 12
POOL = 64 << 20
REFUSED = (
    "olmoe",
    "deepseek2",
    "deepseek2, fused",
    "deepseek2, mixed",
    "nemotron_h_moe",
)  # by llama.cpp itself
KINDS = {name: replace(shape, n_ff=512) for name, shape in MODELS.items() if name not in REFUSED}


def path_of(gpus: GpuSession, kind: str):
    return model_path(gpus, f"{kind}, 512", KINDS[kind])


def assert_parity(
    gpus: GpuSession, kind: str, n_slots: int, *, n_ubatch: int, pool: int, **more: object
) -> None:
    path, prompt = path_of(gpus, kind), prompt_tokens(PREFILL)
    expected = stock_tensor_logits(gpus, path, prompt, DECODE, n_ubatch=n_ubatch)
    with tensor_model(gpus, path, tensor_config(path, n_slots, host_pool_bytes=pool, **more)) as model:
        tiers = shards_of(model)
        assert set(tiers.slots) == {n_slots}
        assert_same(logits_of(model.model, prompt, DECODE, n_ubatch=n_ubatch), expected)
        if pool:
            n_unused = UNUSED_LAYERS.get(kind, 0) if n_slots < KINDS[kind].experts else 0
            layers = tiers.table.layers[: tiers.table.n_layers - n_unused]
            tiers.drain()
            assert tiers.split_source.stats().file.bytes_read <= sum(
                n.n_experts * n.expert_bytes for n in layers
            )
        assert model.binding.counters().device_lookups == 0


@pytest.mark.parametrize(
    ("n_slots", "n_ubatch", "pool", "streamed"),
    [(16, 64, 0, True), (8, 512, POOL, True), (4, 64, POOL, False), (3, 512, 0, False), (1, 16, POOL, True)],
)
@on_fake_gpus
def test_logits_are_bit_identical_with_any_number_of_slots(
    gpus: GpuSession, n_slots, n_ubatch, pool, streamed
):
    gpus.fakes.switch(jitter_us=50)
    stream_tokens = "auto" if streamed else 0
    assert_parity(gpus, "qwen3moe", n_slots, n_ubatch=n_ubatch, pool=pool, stream_tokens=stream_tokens)
    assert all(device.counters()["allreduces"] for device in gpus.fakes.devices), (
        "the devices' own sums were not used"
    )


@pytest.mark.parametrize("kind", ["gpt-oss", "gemma4", "glm4moe", "qwen3moe, mixed"])
@on_fake_gpus
def test_biases_fused_matrices_mixed_types_and_layers_for_drafting(gpus: GpuSession, kind):
    assert_parity(gpus, kind, 8, n_ubatch=64, pool=POOL)


@pytest.mark.deep
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("slots", ["top-k", "half", "all"])
@on_fake_gpus
def test_every_architecture(gpus: GpuSession, kind, slots):
    gpus.fakes.switch(jitter_us=100)
    shape = KINDS[kind]
    n_slots = {"top-k": shape.top_k, "half": shape.experts // 2, "all": shape.experts}[slots]
    assert_parity(gpus, kind, n_slots, n_ubatch=64, pool=POOL)


@on_fake_gpus
def test_sums_by_copies_where_the_backend_has_none_of_its_own(gpus: GpuSession):
    """Stock then overwrites what another device may still read, and is wrong now and then; ours waits."""
    prompt = prompt_tokens(PREFILL)
    stock_tensor_logits(
        gpus, path_of(gpus, "gpt-oss"), prompt, DECODE, n_ubatch=512
    )  # with the devices' own sums
    gpus.fakes.switch(no_sums=1, jitter_us=50)
    before = [device.counters()["async_copies"] for device in gpus.fakes.devices]
    assert_parity(gpus, "gpt-oss", 6, n_ubatch=512, pool=0)
    after = [device.counters()["async_copies"] for device in gpus.fakes.devices]
    assert all(new > old for new, old in zip(after, before, strict=True)), "the devices' own sums were used"


@on_fake_gpus
def test_uneven_shares_are_cut_where_the_engine_cuts(gpus: GpuSession):
    path = path_of(gpus, "gpt-oss")
    table = ExpertTable.from_gguf(path)
    split = ask_tensor_split(gpus.engine, table, ["FAKE0", "FAKE1"], [3.0, 1.0])
    assert {split.cuts()[name].ranges for name in split.names} == {(((0, 384),), ((384, 512),))}
    with tensor_model(
        gpus, path, tensor_config(path, 8, tensor_split=(3.0, 1.0), host_pool_bytes=POOL)
    ) as model:
        first, second = shards_of(model).managers
        assert np.isfinite(logits_of(model.model, prompt_tokens(PREFILL), DECODE)).all()
        assert first.slots == second.slots
        sizes = [[layer.expert_bytes for layer in manager.table.layers] for manager in (first, second)]
        assert all(a != b for a, b in zip(*sizes, strict=True))


@on_fake_gpus
def test_geometry_that_cannot_be_cut_is_refused_before_anything_is_allocated(gpus: GpuSession):
    shape = replace(
        MODELS["qwen3moe"], n_ff=256
    )  # one block of Q6_K in a row of down: nothing for one of two
    path = model_path(gpus, "qwen3moe, one block", shape)
    before = [device.counters()["allocations"] for device in gpus.fakes.devices]
    with pytest.raises(UnsupportedLayoutError, match=r"blk\.0\.ffn_gate_exps.*would get no row of it.*layer"):
        TieredModel.open(gpus.engine, ExpertTable.from_gguf(path), tensor_config(path, 4))
    assert [device.counters()["allocations"] for device in gpus.fakes.devices] == before


@on_fake_gpus
def test_an_architecture_that_llama_cpp_does_not_split_is_refused_with_its_words(gpus: GpuSession):
    path = model_path(gpus, "olmoe", MODELS["olmoe"])
    with pytest.raises(EngineError, match="not implemented for architecture 'olmoe'"):
        TieredModel.open(gpus.engine, ExpertTable.from_gguf(path), tensor_config(path, 4))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"engine_device": "FAKE0"}, "takes two GPUs or more"),
        ({"engine_device": "FAKE0,CPU"}, "FAKE0,CPU names CPU, which has no memory of its own"),
        ({"tensor_split": (1.0, 2.0, 3.0)}, "3 shares for 2 devices"),
        ({"decode_gate": True}, "MOE_DECODE_GATE=1 was asked for together with MOE_SPLIT_MODE=tensor"),
        ({"slab_compute": True}, "MOE_SLAB_COMPUTE=1 was asked for together with MOE_SPLIT_MODE=tensor"),
    ],
)
@on_fake_gpus
def test_devices_that_cannot_share_are_refused(gpus: GpuSession, changes, reason):
    path = path_of(gpus, "qwen3moe")
    with pytest.raises(ConfigError, match=re.escape(reason)):
        TieredModel.open(gpus.engine, ExpertTable.from_gguf(path), replace(tensor_config(path, 4), **changes))


@on_fake_gpus
def test_a_device_without_room_is_named(gpus: GpuSession):
    path = path_of(gpus, "qwen3moe")
    config = replace(tensor_config(path, 4), expert_cache_bytes="auto", headroom_bytes=0)
    gpus.fakes.devices[1].set_memory(1 << 20)
    try:
        with pytest.raises(BudgetError, match="ggml:FAKE1, which has shards of all 2 layers"):
            open_shard_tiers(gpus.engine, ExpertTable.from_gguf(path), config)
    finally:
        gpus.fakes.devices[1].set_memory(1 << 30)


@pytest.mark.parametrize("nth", [1, 4, 30])
@on_fake_gpus
def test_a_failed_read_fails_the_batch_and_the_next_one_is_right(gpus: GpuSession, nth):
    path, prompt = path_of(gpus, "qwen3moe"), prompt_tokens(PREFILL)
    expected = stock_tensor_logits(gpus, path, prompt, DECODE, n_ubatch=64)
    plan = FaultPlan()

    class Failing(FileSource):
        def read_into(self, span, buffer):
            plan.check("read", SourceError)
            super().read_into(span, buffer)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tier_set, "FileSource", Failing)
        with tensor_model(gpus, path, tensor_config(path, 6)) as model:
            with model.model.context(n_ctx=512, n_ubatch=64, n_threads=1) as context:
                plan.arm("read", nth)
                with pytest.raises(DecodeError) as failure:
                    context.decode(prompt, 0)
                assert isinstance(failure.value.__cause__, SourceError)
                shards_of(model).check_valid()
                context.forget()
            assert_same(logits_of(model.model, prompt, DECODE, n_ubatch=64), expected)


@pytest.mark.parametrize("nth", [1, 2, 3])
@on_fake_gpus
def test_refused_pinned_memory_on_one_device_fails_one_batch(gpus: GpuSession, nth):
    """The first blocks of the pools are made at the first misses, of either device."""
    path, prompt = path_of(gpus, "qwen3moe"), prompt_tokens(PREFILL)
    expected = stock_tensor_logits(gpus, path, prompt, DECODE, n_ubatch=64)
    with tensor_model(gpus, path, tensor_config(path, 6, host_pool_bytes=POOL)) as model:
        with model.model.context(n_ctx=512, n_ubatch=64, n_threads=1) as context:
            gpus.fakes.fail("pinned", nth)
            with pytest.raises(DecodeError):
                context.decode(prompt, 0)
            assert not gpus.fakes.is_armed("pinned")
            shards_of(model).check_valid()
        assert_same(logits_of(model.model, prompt, DECODE, n_ubatch=64), expected)


@on_fake_gpus
def test_two_contexts_share_the_slices(gpus: GpuSession):
    path, prompt = path_of(gpus, "qwen3moe"), prompt_tokens(PREFILL)
    expected = stock_tensor_logits(gpus, path, prompt, DECODE, n_ubatch=64)
    with (
        tensor_model(gpus, path, tensor_config(path, 6, host_pool_bytes=POOL)) as model,
        model.model.context(n_ctx=512, n_ubatch=64, n_threads=1) as other,
    ):
        other.decode(prompt[:40], 0)
        found = logits_of(model.model, prompt, DECODE, n_ubatch=64)
        other.decode(prompt[40:60], 40)
        assert_same(found, expected)
        assert_same(logits_of(model.model, prompt, DECODE, n_ubatch=64), expected)


def together(contexts, prompts):
    """Return the logits of prompts that run at the same time, and on from there: each finds queued what the other did.

    On one thread: ggml's Meta backend keeps notes on a model's tensors without a lock.
    """
    found = [[] for _ in contexts]
    for begin in range(0, len(prompts[0]), 4):
        for context, prompt in zip(contexts, prompts, strict=True):
            context.decode(prompt[begin : begin + 4], begin, all_logits=True)
        for context, logits in zip(contexts, found, strict=True):
            logits += [context.logits(i) for i in range(4)]
    for step in range(DECODE):
        for context in contexts:
            context.decode([context.sample()], len(prompts[0]) + step)
        for context, logits in zip(contexts, found, strict=True):
            logits.append(context.logits())
    return [np.stack(logits) for logits in found]


@pytest.mark.deep
@on_fake_gpus
def test_two_contexts_at_the_same_time_wait_for_each_others_slots(gpus: GpuSession):
    """With few slots one's misses fall on slots that the other's queued work still reads."""
    gpus.fakes.switch(jitter_us=300)
    path = path_of(gpus, "qwen3moe")
    prompts = [prompt_tokens(20), prompt_tokens(20)[::-1]]
    expected = [stock_tensor_logits(gpus, path, prompt, DECODE, n_ubatch=4) for prompt in prompts]
    config = tensor_config(path, 8, host_pool_bytes=POOL, stream_tokens=0)
    with (
        tensor_model(gpus, path, config) as model,
        model.model.context(n_ctx=512, n_ubatch=4, n_threads=1) as one,
        model.model.context(n_ctx=512, n_ubatch=4, n_threads=1) as other,
    ):
        found = together([one, other], prompts)
    for logits, right in zip(found, expected, strict=True):
        assert_same(logits, right)


@on_fake_gpus
def test_what_is_said_of_it(gpus: GpuSession):
    path = path_of(gpus, "qwen3moe")
    with tensor_model(gpus, path, tensor_config(path, 8, host_pool_bytes=POOL)) as model:
        model.generate(prompt_tokens(20), 4, n_ctx=64)
        told = model.describe()
        assert [device["device"] for device in told["devices"]] == BOTH.split(",")
        assert told["shards"]["file"]["bytes_read"] > 0
        assert told["shards"]["handed_over"] > 0
        assert told["load"]["expert_bytes_read"] == 0
        assert told["load"]["expert_bytes_skipped"] == ExpertTable.from_gguf(path).expert_bytes_total
