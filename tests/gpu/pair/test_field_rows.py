"""Rows that need more than one device, on two devices of a real llama.cpp, split by layers and by tensors.

The tests bear the numbers of the rows in docs/field-failures.md. Where the fake devices of tests/field count for
themselves, this asks the engine's scheduler, the driver, and the memory of both devices.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest

from engine_runs.tiered_runs import SMALL, prompt_tokens
from expertier.engine_adapter.llama_cpp import LlamaModel
from expertier.engine_adapter.llama_cpp.layer_tiers import open_layer_tiers
from expertier.engine_adapter.llama_cpp.shard_tiers import open_shard_tiers
from expertier.engine_adapter.placement.blocks import place_blocks
from expertier.engine_adapter.placement.engine_device import device_of
from expertier.engine_adapter.tiered_model import TieredModel
from expertier.errors import ConfigError, UnsupportedLayoutError
from expertier.planner.budget.allocate import LayerPlan
from expertier.tiers.config.config import TierConfig
from expertier.tiers.config.split_mode import SplitMode
from expertier.tiers.manager import TierManager
from expertier.tiers.model.slot_layout import GUARD_BYTES
from expertier.tiers.model.table import ExpertTable
from fake_ggml_gpu.models import assert_same, logits_of, model_path
from real_devices.driver import number_of, ordinal_of
from real_devices.models import (
    KINDS,
    ON_TWO,
    SHAPE,
    Split,
    config_of,
    device_of_split,
    managers_of,
    stock_logits,
    stock_model,
    tiered,
    write_kind,
)
from real_devices.process import DeviceSession, on_devices
from real_devices.splits import SplitOfGraph, logged_splits

PROMPT, TOKENS = prompt_tokens(40), 10
KIND = "qwen3moe"
DIRT_BYTES = 256 << 20
POOL = 64 << 20


@pytest.mark.parametrize("split", ON_TWO)
@on_devices
def test_row_02_the_devices_are_sent_what_stock_sends(session: DeviceSession, split):
    """Nothing else is copied between them, with evictions or without: tables are no tensors of the engine's."""
    path = write_kind(session, KIND)
    with logged_splits(session.engine) as of_stock, stock_model(session, path, split) as model:
        logits_of(model, PROMPT, TOKENS)
    devices = {each.logged_device for each in of_stock if each.inputs and "CPU" not in each.logged_device}
    assert len(devices) == (2 if split is Split.LAYER else 1), (
        f"ggml makes one of two that share tensors: {devices}"
    )
    sent = hidden_states(of_stock)
    assert len({name for name, _ in sent}) == (split is Split.LAYER), (
        f"one goes from one device to the other: {sent}"
    )
    for n_slots in (SMALL.experts, SMALL.top_k):
        with (
            logged_splits(session.engine) as of_ours,
            tiered(session, path, split, n_slots, tensor_split=(3.0, 3.0), stream_tokens=0) as model,
        ):
            logits_of(model.model, PROMPT, TOKENS)
            evictions = [manager.stats().l1.evictions for manager in managers_of(model)]
        assert all(n > SMALL.experts if n_slots == SMALL.top_k else n == 0 for n in evictions), evictions
        assert {each.names for each in of_ours} == {each.names for each in of_stock}
        assert hidden_states(of_ours) == sent


def hidden_states(splits: list[SplitOfGraph]) -> set[tuple[str, str]]:
    """The hidden states that are copied from one device to another, with their sizes."""
    return {each for split in splits for each in split.inputs if each[0].startswith("l_out")}


@pytest.mark.parametrize("split", ON_TWO)
@on_devices
def test_row_06_the_slots_of_both_devices_end_in_zeros(session: DeviceSession, split):
    """Read back from each: in memory that was full of something else before, and where slots have moved to others'."""
    path = write_kind(session, KIND)
    expected = stock_logits(session, path, split, PROMPT, TOKENS)
    for name in session.devices[:2]:
        fill_with_dirt(session, name)
    table, config = ExpertTable.from_gguf(path), config_of(session, path, split, SMALL.top_k + 1)
    if split is Split.TENSOR:
        tiers, placement = open_shard_tiers(session.engine, table, config, SHAPE)
    else:
        tiers, placement = open_layer_tiers(session.engine.proxy, table, config, SHAPE)
    with tiers:
        for manager in tiers.managers:
            for layer, n_slots in enumerate(manager.slots):
                manager.prefetch(layer, range(n_slots))
            manager.drain()
            first, *others = manager.slots
            others[-1] += 1  # all layers in between move by a slot
            manager.apply(LayerPlan((first - 1, *others), 0, manager.arena_bytes))
            assert guards_seen(manager)
        with LlamaModel.open(session.engine, path, tiers=tiers, placement=placement) as model:
            assert_same(logits_of(model, PROMPT, TOKENS), expected)
        seen = [guards_seen(manager) for manager in tiers.managers]
        tiers.check_valid()
    assert sum(seen) >= KINDS[KIND].layers
    assert all(seen)


def fill_with_dirt(session: DeviceSession, name: str) -> None:
    """Leave bytes that are NaN in memory that the device's next allocations are likely to get."""
    with device_of(session.engine.proxy, name) as device:
        address = device.alloc(DIRT_BYTES)
        dirt = ctypes.create_string_buffer(b"\xff" * DIRT_BYTES, DIRT_BYTES)
        device.copy_in(address, ctypes.addressof(dirt), DIRT_BYTES)
        device.free(address)


def guards_seen(manager: TierManager) -> int:
    """Assert that all slots of this device's layers end in zeros; returns how many ends were read."""
    guard = (ctypes.c_char * GUARD_BYTES)()
    seen = 0
    for layer, layout in enumerate(manager.table.slot_layouts):
        places = manager._slab.places(layer)
        for place in places[:1] if layout.stride else places:
            end = manager._slab.base + place.offset + manager.slots[layer] * place.stride
            ctypes.memset(guard, 0x55, GUARD_BYTES)
            manager._device.copy_out(ctypes.addressof(guard), end, GUARD_BYTES)
            assert guard.raw == bytes(GUARD_BYTES), (manager._device.name, layer)
            seen += 1
    return seen


@on_devices
def test_row_15_devices_without_a_whole_layer_are_refused(session: DeviceSession):
    """Whatever the shares: every device has some layers with experts, or an error says which one has none."""
    names = device_of_split(session, Split.LAYER)
    path = write_kind(session, KIND)
    table = ExpertTable.from_gguf(path)
    placed, refused = 0, 0
    for first in (0.0, 1e-6, 0.4, 1.0, 2.5, 4.0, 1e6):
        config = TierConfig(engine_device=names, tensor_split=(first, 1.0))
        try:
            placement = place_blocks(session.engine.proxy, table, config)
        except ConfigError as error:
            said = str(error)
            assert "none with experts: leave it out of MOE_DEVICE" in said
            refused += 1
            continue
        assert all(placement.layers(table)), placement
        placed += 1
        with tiered(session, path, Split.LAYER, SMALL.top_k, tensor_split=(first, 1.0)) as model:
            assert [len(layers) for layers in model.placement.layers(table)] == [
                manager.table.n_layers for manager in managers_of(model)
            ]
            assert np.isfinite(logits_of(model.model, PROMPT, 1)).all()
    assert placed >= 2, "some shares give each device a layer"
    assert refused >= 2, "some shares leave a device without one"


@pytest.mark.parametrize("n_ff", [256, 512, 768])
@on_devices
def test_row_15_shards_are_whole_blocks_or_refused_with_the_reason(session: DeviceSession, n_ff):
    """Blocks of 256 elements: two devices cannot share one, and of three one has more than the other."""
    device_of_split(session, Split.TENSOR)
    path = model_path(session, f"pair shards of {n_ff}", replace(KINDS[KIND], layers=2, n_ff=n_ff))
    table, config = ExpertTable.from_gguf(path), config_of(session, path, Split.TENSOR, 5)
    if n_ff == 256:
        with pytest.raises(UnsupportedLayoutError, match="device 0 of the tensor split would get no row"):
            TieredModel.open(session.engine, table, config)
        return
    expected = stock_logits(session, path, Split.TENSOR, PROMPT, TOKENS)
    with tiered(session, path, Split.TENSOR, 5) as model:
        assert_same(logits_of(model.model, PROMPT, TOKENS), expected)
        parts = [manager.table for manager in managers_of(model)]
    for number, matrices in enumerate(zip(*(part.layers[1].matrices for part in parts), strict=True)):
        sizes = [matrix.expert_bytes for matrix in matrices]
        assert sum(sizes) == table.layers[1].matrices[number].expert_bytes
        assert all(n % matrix.type_bytes == 0 for n, matrix in zip(sizes, matrices, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("split", ON_TWO)
@on_devices
def test_row_17_each_device_reads_what_it_can_reach(session: DeviceSession, split, kind):
    """A kernel that read a page of the other's without a mapping would end this process; the results are stock's."""
    path = write_kind(session, kind)
    expected = stock_logits(session, path, split, PROMPT, TOKENS)
    for n_slots, pool in ((SMALL.top_k, 0), (SMALL.experts // 2, POOL), (SMALL.experts, POOL)):
        with tiered(session, path, split, n_slots, host_pool_bytes=pool) as model:
            for _ in range(2):
                assert_same(logits_of(model.model, PROMPT, TOKENS), expected)
            if n_slots < SMALL.experts:
                assert all(manager.stats().l1.misses > 0 for manager in managers_of(model))
    for name in session.devices[:2]:
        fill_with_dirt(session, name)  # an error of a device stays: its next calls would fail


@pytest.mark.parametrize("split", ON_TWO)
@on_devices
def test_row_19_addresses_that_change_hands_find_no_others_experts(session: DeviceSession, split):
    """Models come and go in memory that the one before had, with other layers on each device."""
    bases: list[set[int]] = []
    for turn, kind in enumerate((KIND, "gpt-oss", KIND, "qwen3moe, mixed", KIND)):
        path = write_kind(session, kind)
        expected = stock_logits(session, path, split, PROMPT, TOKENS)
        shares = ((3.0, 3.0), (2.0, 4.0))[turn % 2] if split is Split.LAYER else "auto"
        with tiered(session, path, split, SMALL.top_k, host_pool_bytes=3 << 20, tensor_split=shares) as model:
            bases.append({manager._slab.base for manager in managers_of(model)})
            for _ in range(2):
                assert_same(logits_of(model.model, PROMPT, TOKENS), expected)
    if session.kind == "CUDA":
        assert len(set.union(*bases)) < sum(map(len, bases)), "no address was used again: this shows nothing"


@pytest.mark.parametrize("split", ON_TWO)
@on_devices
def test_row_23_each_device_has_the_slots_of_its_part(session: DeviceSession, split):
    """By the driver's word and by what is free; and the graphs run where the slots are."""
    path = write_kind(session, KIND)
    names = device_of_split(session, split).split(",")
    devices = [device_of(session.engine.proxy, name) for name in names]
    logits_of_stock = stock_logits(session, path, split, PROMPT, TOKENS)  # loads what a driver loads once
    before = [device.free_bytes() for device in devices]
    with tiered(session, path, split, SMALL.experts // 2) as model:
        assert_same(logits_of(model.model, PROMPT, TOKENS), logits_of_stock)
        parts = managers_of(model)
        for name, device, manager, free in zip(names, devices, parts, before, strict=True):
            assert manager._device.name == device.name
            assert manager.arena_bytes >= sum(manager.slots) * manager.table.layers[0].expert_bytes > 0
            if session.reports_own_memory:
                assert free - device.free_bytes() >= manager.arena_bytes, name
            for address in (manager._slab.base, manager._slab.base + manager._slab.n_bytes - 1):
                assert ordinal_of(name, address) in (number_of(name), None)
        assert model.binding.bindings[0].counters().graphs > TOKENS
        assert model.binding.bindings[1].counters().graphs > TOKENS
        n_layers = [manager.table.n_layers for manager in parts]
        if split is Split.LAYER:
            assert sorted(n_layers) == [2, 3], "equal devices have equal shares"
        else:
            assert model.tiers.split_source is not None
            assert n_layers == [KINDS[KIND].layers] * 2
    assert config_of(session, path, split, 4).split_mode is SplitMode(str(split))
