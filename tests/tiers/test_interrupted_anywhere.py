"""Slow calls of the tiers, interrupted at every instruction; `test_interrupted.py` takes a sample of instructions."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import expertier as et
from expertier.testing import FakeDevice
from expertier.tiers.layer_division import DeviceShare, LayerDivision
from expertier.tiers.tier_set import TierSet
from interruptions.interrupt_at import at_every_instruction
from interruptions.interrupted_calls import (
    ALL,
    FOLDERS,
    OPERATIONS,
    closed_at,
    everywhere,
    evict,
    groups,
    miss,
    opened_or_not,
)
from interruptions.interrupted_tiers import (
    DEVICES,
    SOURCE,
    TABLE,
    assert_next_interrupt_is_raised,
    config,
)

pytestmark = [pytest.mark.deep, pytest.mark.usefixtures("interruptible")]


@pytest.mark.parametrize("pool_experts", [0, 4])
@pytest.mark.parametrize("call", [miss, groups])
@pytest.mark.parametrize("device", DEVICES)
def test_misses_interrupted_anywhere(
    device: str, call: Callable[[et.TierManager], None], pool_experts: int
) -> None:
    assert everywhere(device, config(pool_experts=pool_experts), call, before=evict) > 2000


@pytest.mark.parametrize("pool_experts", [0, 4])
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("device", DEVICES)
def test_the_rest_interrupted_anywhere(device: str, name: str, pool_experts: int) -> None:
    call, before, undo = OPERATIONS[name]
    assert everywhere(device, config(pool_experts=pool_experts), call, before=before, undo=undo) > 500


def test_opening_interrupted_anywhere() -> None:
    n, opened = opened_or_not(ALL)
    assert n > 10_000
    assert opened < 5, "only after the last statement"


def test_closing_interrupted_anywhere() -> None:
    assert closed_at(ALL) > 1000


def test_a_set_of_tiers_opened_used_and_closed_interrupted_somewhere() -> None:
    """Its managers are opened and closed together, whichever of them an interrupt comes at."""
    devices = [FakeDevice(name="fake:0"), FakeDevice(name="fake:1")]
    sets: list[TierSet] = []

    def open_use_and_close() -> None:
        sets.append(object.__new__(TierSet))  # an interrupt may come when the constructor has ended
        sets[-1].__init__(  # type: ignore[misc]
            LayerDivision(TABLE, [DeviceShare(device, (layer,)) for layer, device in enumerate(devices)]),
            config=config(pool_experts=4),
            source=SOURCE,
        )
        with sets[-1] as tiers:
            for layer in range(2):
                ((manager, own),) = tiers.places_of(layer)
                manager.acquire(own, [1, 2]).release()

    for _ in range(2):
        open_use_and_close()
    n = unclosed = 0
    for found in at_every_instruction(open_use_and_close, FOLDERS, at=range(1, 1 << 20, 307)):
        assert isinstance(found.error, KeyboardInterrupt), f"{found.error!r} at {found.place}"
        if any(device.device_bytes for device in devices):
            unclosed += 1
            sets[-1].close()
        for device in devices:
            assert device.device_bytes == device.pinned_bytes == device.n_events == 0, found.place
            assert device.streams == (0,), found.place
        assert_next_interrupt_is_raised(found.place)
        n += 1
    assert n > 50
    assert unclosed < 3, "only between the constructor and the block"
