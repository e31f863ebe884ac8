"""Devices of a real llama.cpp without room for a slot a layer: an error that names the device; nothing stays behind."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from engine_runs.tiered_runs import SMALL, prompt_tokens
from expertier.engine_adapter.placement.engine_device import device_of
from expertier.engine_adapter.tiered_model import TieredModel
from expertier.errors import BudgetError, DeviceError
from expertier.tiers.model.table import ExpertTable
from expertier.units import MIB
from fake_ggml_gpu.models import assert_same, logits_of
from real_devices.models import (
    EVERY_SPLIT,
    KINDS,
    SHAPE,
    Split,
    config_of,
    device_of_split,
    stock_logits,
    tiered,
    write_kind,
)
from real_devices.process import DeviceSession, on_devices

PROMPT, TOKENS = prompt_tokens(40), 6
KIND = "qwen3moe"
LEFT = 128 * MIB  # less than the headroom, and more than what a driver shows as free and keeps
TOLERANCE = 64 * MIB  # what a driver takes for itself meanwhile, or holds back


@contextmanager
def filled(session: DeviceSession, name: str, left: int) -> Iterator[None]:
    """Have at most `left` bytes of the device free inside the block."""
    with device_of(session.engine.proxy, name) as device:
        taken: list[int] = []
        piece = device.free_bytes() - left
        try:
            while device.free_bytes() > left:
                piece = min(piece, device.free_bytes() - left // 2)
                try:
                    taken.append(device.alloc(piece))
                except DeviceError:  # not in one piece
                    piece //= 2
                    assert piece >= MIB, f"{name} has {device.free_bytes()} bytes free and gives none"
            yield
        finally:
            for address in taken:
                device.free(address)


def what_is_named(split: Split, name: str) -> str:
    """The device with its part of the model, as the error has it."""
    return {
        Split.ONE: "",
        Split.LAYER: rf"ggml:{name}, which has \d of {KINDS[KIND].layers} layers with experts: ",
        Split.TENSOR: f"ggml:{name}, which has shards of all {KINDS[KIND].layers} layers: ",
    }[split]


@pytest.mark.parametrize("full", [0, 1])
@pytest.mark.parametrize("split", EVERY_SPLIT)
@on_devices
def test_a_full_device_is_named(session: DeviceSession, split, full):
    """Its memory is taken through the device, as another program would; the model runs once that is given back."""
    names = device_of_split(session, split).split(",")
    if full >= len(names):
        pytest.skip("there is no second device to fill")
    if not session.reports_own_memory:
        pytest.skip("the servers report this machine's RAM, which no test should fill")
    path = write_kind(session, KIND)
    table = ExpertTable.from_gguf(path)
    config = config_of(session, path, split, SMALL.top_k, expert_cache_bytes="auto")
    expected = stock_logits(session, path, split, PROMPT, TOKENS)
    devices = [device_of(session.engine.proxy, name) for name in names]
    before = [device.free_bytes() for device in devices]
    with filled(session, names[full], LEFT):
        inside = [device.free_bytes() for device in devices]
        assert inside[full] <= LEFT
        with pytest.raises(BudgetError, match=what_is_named(split, names[full])) as caught:
            TieredModel.open(session.engine, table, config, shape=SHAPE)
        said = str(caught.value)
        print(said)
        assert "one expert slot" in said, said
        assert "MiB on the device" in said, said
        for device, free in zip(devices, inside, strict=True):
            assert abs(device.free_bytes() - free) <= TOLERANCE, (
                f"{device.name} lost memory to what was refused"
            )
    for device, free in zip(devices, before, strict=True):
        assert abs(device.free_bytes() - free) <= TOLERANCE, device.name
    with tiered(session, path, split, SMALL.top_k) as model:
        assert_same(logits_of(model.model, PROMPT, TOKENS), expected)


@pytest.mark.parametrize("split", EVERY_SPLIT)
@on_devices
def test_a_budget_below_the_floor_tells_the_smallest_that_works(session: DeviceSession, split):
    """And that one does work."""
    path = write_kind(session, KIND)
    table = ExpertTable.from_gguf(path)
    config = config_of(session, path, split, 1, expert_cache_bytes=MIB)
    with pytest.raises(BudgetError) as caught:
        TieredModel.open(session.engine, table, config, shape=SHAPE)
    found = re.search(r"set MOE_EXPERT_CACHE_MIB to at least (\d+)", str(caught.value))
    assert found, caught.value
    smallest = replace(config, expert_cache_bytes=int(found[1]) * MIB)
    with TieredModel.open(session.engine, table, smallest, shape=SHAPE) as model:
        assert min(model.tiers.slots) >= 1
        assert np.isfinite(logits_of(model.model, PROMPT, TOKENS)).all()
