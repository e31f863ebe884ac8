"""Rows that need more than one device: a model's layers over two fake GPUs, with tiers on each.

Each test bears the number of its row in docs/field-failures.md.
"""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from engine_runs.tiered_runs import SMALL, prompt_tokens
from expertier.engine_adapter.placement.blocks import place_blocks
from expertier.engine_adapter.placement.engine_device import device_of
from expertier.engine_adapter.placement.placement import Placement
from expertier.errors import ConfigError
from expertier.hip.host import HostDevice
from expertier.tiers.config.config import TierConfig
from expertier.tiers.layer_division import DeviceShare, LayerDivision
from expertier.tiers.model.slot_layout import GUARD_BYTES
from expertier.tiers.model.table import ExpertTable
from fake_ggml_gpu.ggml import Ggml
from fake_ggml_gpu.models import assert_same, logits_of
from fake_ggml_gpu.process import GpuSession, on_fake_gpus
from fake_ggml_gpu.split_models import BOTH, cut, split_model, split_path, split_tiers, stock_split_logits

PROMPT, TOKENS = prompt_tokens(24), 10
KIND = "qwen3moe"


@on_fake_gpus
def test_row_02_the_second_device_has_tables_of_its_own(gpus: GpuSession):
    """Only hidden states cross from one to the other, as many bytes with evictions as without."""
    path = split_path(gpus, KIND)
    expected = stock_split_logits(gpus, path, PROMPT, TOKENS)
    crossed = []
    for n_slots in (SMALL.experts, SMALL.top_k):
        placement = cut(path, 3)
        with (
            split_tiers(gpus, path, n_slots, placement, stream_tokens=0) as tiers,
            split_model(gpus, tiers, placement) as model,
        ):
            tiers.drain()
            before = [device.counters() for device in gpus.fakes.devices]
            assert_same(logits_of(model, PROMPT, TOKENS), expected)
            after = [device.counters() for device in gpus.fakes.devices]
            evictions = [manager.stats().l1.evictions for manager in tiers.managers]
        assert all(n > SMALL.experts if n_slots == SMALL.top_k else n == 0 for n in evictions), (
            n_slots,
            evictions,
        )
        crossed.append(
            [
                (new["async_copies"] - old["async_copies"], new["bytes_within"] - old["bytes_within"])
                for new, old in zip(after, before, strict=True)
            ]
        )
    hidden_bytes = 4 * SMALL.n_embd * (len(PROMPT) + TOKENS)
    assert crossed[0] == [(TOKENS + 1, hidden_bytes), (0, 0)]
    assert [n for n, _ in crossed[1]] == [n for n, _ in crossed[0]], "passes copy inside of graphs only"


@on_fake_gpus
def test_row_06_the_slots_of_both_devices_end_in_zeros(gpus: GpuSession):
    """Also after graphs have run on them: fresh memory of these devices is full of NaN."""
    path = split_path(gpus, KIND)
    placement = cut(path, 2)
    guard = (ctypes.c_char * GUARD_BYTES)()
    with (
        split_tiers(gpus, path, 5, placement) as tiers,
        split_model(gpus, tiers, placement) as model,
    ):
        logits_of(model, PROMPT, TOKENS)
        seen = 0
        for manager in tiers.managers:
            for layer, layout in enumerate(manager.table.slot_layouts):
                places = manager._slab.places(layer)
                for place in places[:1] if layout.stride else places:
                    end = manager._slab.base + place.offset + manager.slots[layer] * place.stride
                    manager._device.copy_out(ctypes.addressof(guard), end, GUARD_BYTES)
                    assert guard.raw == bytes(GUARD_BYTES), (manager._device.name, layer)
                    seen += 1
        assert seen >= tiers.table.n_layers


@on_fake_gpus
def test_row_15_devices_without_a_whole_layer_are_refused(gpus: GpuSession):
    """Whatever the shares: every device has some layers with experts, or an error says which one has none."""
    table = ExpertTable.from_gguf(split_path(gpus, KIND))
    proxy = gpus.engine.proxy
    for first in (0.0, 1e-6, 0.4, 1.0, 2.5, 4.0, 1e6):
        config = TierConfig(engine_device=BOTH, tensor_split=(first, 1.0))
        try:
            placement = place_blocks(proxy, table, config)
        except ConfigError as error:
            told = str(error)
            assert "none with experts: leave it out of MOE_DEVICE" in told
            continue
        assert all(placement.layers(table)), placement
        assert sum(placement.units) == table.n_layers + 1
    few = table.of_layers((0,))
    for cuts in (((0,), ()), ((0,), (0,))):
        with pytest.raises(ValueError, match="each share needs a layer"):
            LayerDivision(few, [DeviceShare(HostDevice(), layers) for layers in cuts])


@on_fake_gpus
def test_row_17_each_device_reads_its_own_memory_alone(gpus: GpuSession):
    """A use of the other's is a fault here, as on hardware without a mapping for it: there is none, however it runs."""
    path = split_path(gpus, KIND)
    expected = stock_split_logits(gpus, path, PROMPT, TOKENS)
    with Ggml(gpus.engine) as ggml:
        stream, [other] = ggml.stream("FAKE0"), ggml.vectors("FAKE1", 1, 8)
        ggml.tensor_set_async(stream, other, np.zeros(8, np.float32).ctypes.data, 0, 32)
        assert "in a buffer of type FAKE1" in gpus.fakes.take_faults(), "a use of the other's memory is found"
    for n_slots, stream_tokens in ((1, 0), (SMALL.top_k, "auto"), (SMALL.experts, 0)):
        placement = cut(path, 2)
        with (
            split_tiers(gpus, path, n_slots, placement, stream_tokens=stream_tokens) as tiers,
            split_model(gpus, tiers, placement) as model,
        ):
            assert_same(logits_of(model, PROMPT, TOKENS), expected)
        assert gpus.fakes.take_faults() == ""


@on_fake_gpus
def test_row_19_addresses_that_change_hands_find_no_others_experts(gpus: GpuSession):
    """Models come and go in memory that the one before had, with the devices the other way round."""
    paths = [split_path(gpus, kind) for kind in (KIND, "llama", KIND)]
    for turn, path in enumerate(paths):
        expected = stock_split_logits(gpus, path, PROMPT, TOKENS)
        forward = cut(path, 2)
        placement = Placement(forward.devices[:: -1 if turn % 2 else 1], forward.units)
        with (
            split_tiers(gpus, path, SMALL.top_k, placement, host_pool_bytes=3 << 20) as tiers,
            split_model(gpus, tiers, placement) as model,
        ):
            for _ in range(2):
                assert_same(logits_of(model, PROMPT, TOKENS), expected)


@on_fake_gpus
def test_row_23_each_device_has_the_slots_of_its_layers(gpus: GpuSession):
    """Asked for both, the slots are in proportion to the layers, and the graphs run where their slots are."""
    path = split_path(gpus, KIND)
    table = ExpertTable.from_gguf(path)
    before = [device.counters() for device in gpus.fakes.devices]
    placement = place_blocks(gpus.engine.proxy, table, TierConfig(engine_device=BOTH))
    with (
        split_tiers(gpus, path, 6, placement) as tiers,
        split_model(gpus, tiers, placement) as model,
    ):
        for device, manager, old in zip(gpus.fakes.devices, tiers.managers, before, strict=True):
            assert manager._device.name == device_of(gpus.engine.proxy, device.name).name
            assert sum(manager.slots) == 6 * manager.table.n_layers
            assert device.counters()["live_bytes"] - old["live_bytes"] >= manager.arena_bytes
        logits_of(model, PROMPT, TOKENS)
        assert all(each.counters().graphs > TOKENS for each in model.binding.bindings)
        assert sorted(manager.table.n_layers for manager in tiers.managers) == [2, 3]
