"""A model on two devices: how their memory decides which device holds which layers, and what fails on one of them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from engine_runs.tiered_runs import SMALL, assert_nothing_held, prompt_tokens
from expertier.engine_adapter.placement.blocks import place_blocks
from expertier.engine_adapter.placement.engine_device import EngineDevice
from expertier.engine_adapter.placement.placement import Placement
from expertier.engine_adapter.tiered_model import TieredModel
from expertier.errors import BudgetError, ConfigError, DecodeError, DeviceError
from expertier.planner.budget.context_memory import ContextShape
from expertier.tiers.config.config import TierConfig
from expertier.tiers.model.table import ExpertTable
from expertier.units import MIB
from failures.refused_at_opening import check_refusals_at_opening
from fake_ggml_gpu.models import assert_same, logits_of
from fake_ggml_gpu.process import GpuSession, on_fake_gpus
from fake_ggml_gpu.split_models import (
    BOTH,
    LAYERS,
    cut,
    split_model,
    split_path,
    split_tiers,
    stock_split_logits,
)

PROMPT, TOKENS = prompt_tokens(40), 6
SHAPE = ContextShape(n_ctx=512, n_ubatch=128, full_windows=True)
KIND = "qwen3moe"


@contextmanager
def memory(gpus: GpuSession, *n_bytes: int) -> Iterator[None]:
    """Give the devices so many bytes of memory inside the block."""
    for device, size in zip(gpus.fakes.devices, n_bytes, strict=True):
        device.set_memory(size)
    try:
        yield
    finally:
        for device in gpus.fakes.devices:
            device.set_memory(1 << 30)


@pytest.mark.parametrize("first", [1, 3])
@on_fake_gpus
def test_experts_lie_on_their_layers_device_alone(gpus: GpuSession, first):
    """With a slot for each expert, a device gets its own layers' experts, once, and weights that are no experts."""
    path = split_path(gpus, KIND)
    placement = cut(path, first)
    before = [device.counters() for device in gpus.fakes.devices]
    with (
        split_tiers(gpus, path, SMALL.experts, placement) as tiers,
        split_model(gpus, tiers, placement),
    ):
        tiers.drain()
        after = [device.counters() for device in gpus.fakes.devices]
    table = tiers.table
    rest = path.stat().st_size - table.expert_bytes_total  # what is no expert
    arrived = [
        new["bytes_to_device"] - old["bytes_to_device"] for new, old in zip(after, before, strict=True)
    ]
    taken = [new["live_bytes"] - old["live_bytes"] for new, old in zip(after, before, strict=True)]
    for manager, layers, n_bytes, live in zip(
        tiers.managers, (first, LAYERS - first), arrived, taken, strict=True
    ):
        assert manager.table.n_layers == layers
        assert n_bytes >= manager.table.expert_bytes_total
        assert live >= manager.table.expert_bytes_total
    one_layer = min(layer.n_experts * layer.expert_bytes for layer in table.layers)
    spare = table.expert_bytes_total + rest - sum(arrived)
    assert 0 <= spare < one_layer, "no layer's experts went to both"


@on_fake_gpus
def test_a_fuller_device_gets_fewer_layers(gpus: GpuSession):
    """Whatever memory the second device has: the model runs as in stock, or the error names the device."""
    path = split_path(gpus, KIND)
    table = ExpertTable.from_gguf(path)
    config = TierConfig(engine_device=BOTH, headroom_bytes=0)
    expected = stock_split_logits(gpus, path, PROMPT, TOKENS, n_ubatch=128)
    layers, slots, said = [], [], []
    for n_bytes in range(2 * MIB, 27 * MIB, 3 * MIB):
        with memory(gpus, 16 * MIB, n_bytes):
            try:
                with TieredModel.open(gpus.engine, table, config, shape=SHAPE) as opened:
                    assert_same(logits_of(opened.model, PROMPT, TOKENS, n_ubatch=128), expected)
                    layers.append(opened.placement.units[1] - 1)
                    slots.append(sum(opened.tiers.slots))
            except BudgetError as error:
                said.append(str(error))
                layers.append(0)
                slots.append(0)
    assert layers == sorted(layers), layers
    assert slots == sorted(slots), slots
    assert len(set(layers)) >= 3, layers
    assert slots[-1] > next(n for n in slots if n), slots
    assert said, "the smallest has no room for one layer"
    for n_bytes, message in zip(range(2 * MIB, 27 * MIB, 3 * MIB), said, strict=False):
        assert "ggml:FAKE1, which has 1 of 5 layers with experts: one expert slot" in message
        assert f"of {n_bytes / MIB:.1f} MiB on the device" in message


@on_fake_gpus
def test_auto_takes_one_device_where_all_fits_there(gpus: GpuSession):
    table = ExpertTable.from_gguf(split_path(gpus, KIND))
    proxy = gpus.engine.proxy
    config = TierConfig(headroom_bytes=0)
    assert place_blocks(proxy, table, config, SHAPE) == Placement.on_one("FAKE0")
    with memory(gpus, 20 * MIB, 20 * MIB):
        assert place_blocks(proxy, table, config, SHAPE).devices == ("FAKE0", "FAKE1")
        few = TierConfig(headroom_bytes=0, expert_cache_bytes=2 * MIB)
        assert place_blocks(proxy, table, few, SHAPE) == Placement.on_one("FAKE0")
        assert place_blocks(proxy, table, TierConfig(engine_device="FAKE1"), SHAPE) == Placement.on_one(
            "FAKE1"
        )
    handler = logging.Handler()
    said: list[str] = []
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("expertier").addHandler(handler)
    try:
        with memory(gpus, 20 * MIB, 1 * MIB):
            assert place_blocks(proxy, table, config, SHAPE) == Placement.on_one("FAKE0")
    finally:
        logging.getLogger("expertier").removeHandler(handler)
    assert [line for line in said if line.startswith("FAKE1 is left out: it has 0.0 MiB")]


@on_fake_gpus
def test_the_users_shares_go_before_ours(gpus: GpuSession):
    path = split_path(gpus, KIND)
    table = ExpertTable.from_gguf(path)
    proxy = gpus.engine.proxy
    for shares, units in (((3.0, 1.0), (5, 1)), ((1.0, 1.0), (3, 3)), ((1.0, 3.0), (2, 4))):
        config = TierConfig(engine_device=BOTH, tensor_split=shares, expert_cache_bytes=6 * MIB)
        if units[1] == 1:
            with pytest.raises(ConfigError, match="FAKE1 would have 1 of 6 layers, and none with experts"):
                place_blocks(proxy, table, config, SHAPE)
            continue
        with TieredModel.open(gpus.engine, table, config, shape=SHAPE) as opened:
            assert opened.placement == Placement(("FAKE0", "FAKE1"), units)
            assert (
                logits_of(opened.model, PROMPT, 1).tobytes()
                == stock_split_logits(gpus, path, PROMPT, 1).tobytes()
            )
    with pytest.raises(ConfigError, match="3 shares for 2 devices"):
        place_blocks(proxy, table, TierConfig(engine_device=BOTH, tensor_split=(1.0, 1.0, 1.0)))
    with pytest.raises(ConfigError, match="CPU, which has no memory of its own"):
        place_blocks(proxy, table, TierConfig(engine_device="FAKE0,CPU"))
    with pytest.raises(DeviceError, match="FAKE7"):
        place_blocks(proxy, table, TierConfig(engine_device="FAKE0,FAKE7"))


@pytest.mark.parametrize("stream_tokens", [0, "auto"])
@pytest.mark.parametrize("device", ["FAKE0", "FAKE1"])
@on_fake_gpus
def test_one_devices_failed_copy_fails_the_batch(gpus: GpuSession, device, stream_tokens):
    """The batch's error has the copy's as its cause; no slot is held on either device, and the next batch works."""
    path = split_path(gpus, KIND)
    expected = stock_split_logits(gpus, path, PROMPT, TOKENS)
    placement = cut(path, 2)
    real, left = EngineDevice.copy_in, [0]

    def copy_in(self: EngineDevice, *arguments: int) -> None:
        if self.name == f"ggml:{device}" and left[0] > 0:
            left[0] -= 1
            if left[0] == 0:
                raise DeviceError(f"a copy to {device} failed")
        real(self, *arguments)

    with (
        pytest.MonkeyPatch.context() as patch,
        split_tiers(gpus, path, SMALL.top_k, placement, stream_tokens=stream_tokens) as tiers,
        split_model(gpus, tiers, placement) as model,
        model.context(n_ctx=128, n_threads=1) as context,
    ):
        patch.setattr(EngineDevice, "copy_in", copy_in)
        for nth in (1, 7):
            left[0] = nth
            context.forget()
            with pytest.raises(DecodeError, match="status -3") as caught:
                context.decode(PROMPT, 0)
            assert isinstance(caught.value.__cause__, DeviceError)
            assert device in str(caught.value.__cause__)
            layers = "0 to 1" if device == "FAKE0" else "2 to 4"
            assert f"(on TIER_{device}, which has the model's layers {layers})" in str(caught.value)
            for manager in tiers.managers:
                assert_nothing_held(manager)
        patch.undo()
        assert_same(logits_of(model, PROMPT, TOKENS), expected)


@pytest.mark.parametrize(
    "call",
    ["memory", "stream", *(pytest.param(call, marks=pytest.mark.deep) for call in ("pinned", "event"))],
)
@on_fake_gpus
def test_what_a_device_refuses_at_opening(gpus: GpuSession, call):
    """Whichever call on either device it refuses: an error, nothing is left on both, and the next opening works."""
    path = split_path(gpus, KIND)
    expected = stock_split_logits(gpus, path, PROMPT, TOKENS)
    config = TierConfig(
        expert_cache_bytes=4 << 20, host_pool_bytes=3 << 20, engine_device=BOTH, tensor_split=(3.0, 3.0)
    )
    numbers = (*range(1, 10), *range(10, 130, 12))
    check_refusals_at_opening(gpus, call, path, config, PROMPT, TOKENS, expected, numbers)
