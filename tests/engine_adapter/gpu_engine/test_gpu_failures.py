"""What fails on a device fails one batch or one opening with a clear error, and leaves nothing behind."""

from __future__ import annotations

import errno
import os

import pytest

from engine_runs.tiered_runs import SMALL, assert_nothing_held, prompt_tokens
from expertier.engine_adapter.placement.engine_device import device_of
from expertier.engine_adapter.tiered_model import TieredModel
from expertier.errors import BudgetError, DecodeError, DeviceError, SourceError
from expertier.planner.budget.context_memory import ContextShape
from expertier.tiers.config.config import TierConfig
from expertier.tiers.model.table import ExpertTable
from expertier.units import MIB
from failures.failing_reads import FailingReads
from failures.refused_at_opening import check_refusals_at_opening
from fake_ggml_gpu.models import (
    DEVICE,
    assert_same,
    gpu_model,
    gpu_tiers,
    logits_in,
    logits_of,
    model_path,
    stock_logits,
)
from fake_ggml_gpu.process import GpuSession, on_fake_gpus
from model_files.architecture_models import MODELS

PROMPT = prompt_tokens(40)
TOKENS = 8
POOL_BYTES = 64 << 20
KIND = "qwen3moe"


@pytest.mark.parametrize("n_slots", [1, SMALL.top_k])
@pytest.mark.parametrize("nth", [1, 20])
@pytest.mark.parametrize("stream_tokens", [0, "auto"])
@pytest.mark.parametrize("pool_bytes", [0, POOL_BYTES])
@on_fake_gpus
def test_a_failed_read_fails_the_batch(gpus: GpuSession, n_slots, nth, stream_tokens, pool_bytes):
    path = model_path(gpus, KIND, MODELS[KIND])
    expected = stock_logits(gpus, path, PROMPT, TOKENS)
    with (
        pytest.MonkeyPatch.context() as patch,
        gpu_tiers(gpus, path, n_slots, host_pool_bytes=pool_bytes, stream_tokens=stream_tokens) as tiers,
        gpu_model(gpus, tiers) as model,
        model.context(n_ctx=128, n_threads=1) as context,
    ):
        reads = FailingReads(patch)
        reads.fail_call(nth)
        with pytest.raises(DecodeError, match="status -3") as caught:
            context.decode(PROMPT, 0)
        assert reads.failed == 1
        assert isinstance(caught.value.__cause__, SourceError)
        assert_nothing_held(tiers)
        assert_same(logits_in(context, PROMPT, TOKENS), expected)


@pytest.mark.parametrize("n_slots", [1, SMALL.top_k, SMALL.experts])
@pytest.mark.parametrize("stream_tokens", [0, "auto"])
@on_fake_gpus
def test_while_all_reads_fail(gpus: GpuSession, n_slots, stream_tokens):
    """Reads in the background fail as well, but no batch fails because of them."""
    path = model_path(gpus, KIND, MODELS[KIND])
    expected = stock_logits(gpus, path, PROMPT, TOKENS)

    def break_off() -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with (
        pytest.MonkeyPatch.context() as patch,
        gpu_tiers(gpus, path, n_slots, host_pool_bytes=POOL_BYTES, stream_tokens=stream_tokens) as tiers,
    ):
        reads = FailingReads(patch)
        reads.before_each = break_off
        with gpu_model(gpus, tiers) as model, model.context(n_ctx=128, n_threads=1) as context:
            for _ in range(2):
                with pytest.raises(DecodeError, match="status -3") as caught:
                    context.decode(PROMPT, 0)
                assert isinstance(caught.value.__cause__, SourceError)
            reads.before_each = None
            assert_same(logits_in(context, PROMPT, TOKENS), expected)


@pytest.mark.parametrize("call", ["memory", "pinned", "stream", "event"])
@on_fake_gpus
def test_what_a_device_refuses_at_opening(gpus: GpuSession, call):
    """Whichever call it refuses: an error, nothing is left on the device, and the next opening works."""
    path = model_path(gpus, KIND, MODELS[KIND])
    expected = stock_logits(gpus, path, PROMPT, TOKENS)
    config = TierConfig(expert_cache_bytes=2 << 20, host_pool_bytes=POOL_BYTES, engine_device=DEVICE)
    numbers = (*range(1, 12), *range(12, 100, 8))
    check_refusals_at_opening(gpus, call, path, config, PROMPT, TOKENS, expected, numbers)


@on_fake_gpus
def test_a_device_without_room_says_so(gpus: GpuSession):
    path = model_path(gpus, KIND, MODELS[KIND])
    device = gpus.fakes.devices[0]
    device.set_memory(256 << 10)
    try:
        config = TierConfig(expert_cache_bytes=1 << 20, engine_device=DEVICE)
        with pytest.raises(DeviceError, match="MOE_EXPERT_CACHE_MIB"):
            TieredModel.open(gpus.engine, ExpertTable.from_gguf(path), config)
    finally:
        device.set_memory(1 << 30)


@pytest.mark.parametrize("kind", ["qwen3moe", "gpt-oss", "deepseek2"])
@on_fake_gpus
def test_auto_leaves_room_for_the_rest(gpus: GpuSession, kind):
    """Whatever a device has: the model and its context fit beside the slots, or an error says what is missing."""
    path = model_path(gpus, kind, MODELS[kind])
    table, device = ExpertTable.from_gguf(path), gpus.fakes.devices[0]
    shape = ContextShape(n_ctx=512, n_ubatch=128, full_windows=True)
    config = TierConfig(engine_device=DEVICE, headroom_bytes=0)
    expected = stock_logits(gpus, path, PROMPT, TOKENS, n_ubatch=128)
    n_slots = []
    try:
        for n_bytes in range(8 * MIB, 33 * MIB, 2 * MIB):
            device.set_memory(n_bytes)
            try:
                with TieredModel.open(gpus.engine, table, config, shape=shape) as opened:
                    assert_same(logits_of(opened.model, PROMPT, TOKENS, n_ubatch=128), expected)
                    n_slots.append(min(opened.tiers.slots))
            except BudgetError:
                n_slots.append(0)
    finally:
        device.set_memory(1 << 30)
    assert n_slots == sorted(n_slots)
    assert 0 < min(n_slots, key=lambda n: n or MODELS[kind].experts) < MODELS[kind].experts == n_slots[-1]


@on_fake_gpus
def test_no_such_device(gpus: GpuSession):
    with pytest.raises(DeviceError, match="FAKE0"):
        device_of(gpus.engine.proxy, "FAKE7")


@on_fake_gpus
def test_closed_and_opened_again(gpus: GpuSession):
    """Closing frees everything on the devices each time, and the tiers are made anew."""
    path = model_path(gpus, KIND, MODELS[KIND])
    expected = stock_logits(gpus, path, PROMPT, TOKENS)
    idle = [device.live() for device in gpus.fakes.devices]
    for n_slots in (1, SMALL.experts, SMALL.top_k):
        with gpu_tiers(gpus, path, n_slots, host_pool_bytes=POOL_BYTES) as tiers:
            for _ in range(2):
                with gpu_model(gpus, tiers) as model:
                    assert_same(logits_of(model, PROMPT, TOKENS), expected)
        assert [device.live() for device in gpus.fakes.devices] == idle


@on_fake_gpus
def test_misses_come_from_pinned_memory(gpus: GpuSession):
    """No expert byte reaches the device from memory that is not pinned, pool or no pool (D6)."""
    path = model_path(gpus, KIND, MODELS[KIND])
    for pool_bytes in (0, POOL_BYTES):
        for stream_tokens in (0, "auto"):
            with (
                gpu_tiers(gpus, path, 4, host_pool_bytes=pool_bytes, stream_tokens=stream_tokens) as tiers,
                gpu_model(gpus, tiers) as model,
            ):
                expert_bytes = tiers.table.layers[0].expert_bytes
                with model.context(n_ctx=128, n_threads=1) as context:
                    before = gpus.fakes.devices[0].counters()
                    context.decode(PROMPT, 0)
                    after = gpus.fakes.devices[0].counters()
                moved = after["bytes_to_device"] - before["bytes_to_device"]
                pageable = after["pageable_bytes_to_device"] - before["pageable_bytes_to_device"]
                assert moved > 4 * expert_bytes
                assert pageable < expert_bytes, f"{pageable} of {moved} bytes, pool {pool_bytes}"
