"""The slab: ranges from the high end, zeros, and plans that do not fit."""

from __future__ import annotations

import ctypes

import pytest

from expertier.errors import BudgetError, DeviceError
from expertier.hip.fault_plan import FaultPlan
from expertier.hip.faults import FaultyDevice
from expertier.hip.host import HostDevice
from expertier.tiers.slab import Slab
from expertier.tiers.slot_layout import GUARD_BYTES, SlotLayout
from gguf_files import Block, ModelFile, write_model


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> tuple[SlotLayout, ...]:
    blocks = [Block(), Block(types=("Q4_0", "Q4_0", "Q8_0")), Block(n_experts=4)]
    model: ModelFile = write_model(tmp_path_factory.mktemp("model") / "m.gguf", blocks)
    return model.table.slot_layouts


def test_ranges_are_stacked_from_the_high_end(layouts: tuple[SlotLayout, ...]) -> None:
    device = HostDevice()
    slab = Slab(device, layouts, 100_001)
    assert slab.n_bytes == 100_096
    slab.apply([2, 3, 1])
    slab.check_valid()
    assert slab.used_bytes == sum(layout.range_bytes(n) for layout, n in zip(layouts, [2, 3, 1], strict=True))
    assert slab.places(0)[0].offset == slab.n_bytes - slab.used_bytes
    last = slab.places(2)
    assert slab.n_bytes - (last[0].offset + layouts[2].slot_bytes) >= GUARD_BYTES
    slab.close()
    slab.close()
    device.close()


def test_applying_again_clears_every_byte(layouts: tuple[SlotLayout, ...]) -> None:
    device = HostDevice()
    slab = Slab(device, layouts, 60_000)
    slab.apply([2, 2, 2])
    ctypes.memset(slab.base, 0xFF, slab.n_bytes)
    slab.apply([1, 4, 2])
    assert ctypes.string_at(slab.base, slab.n_bytes) == bytes(slab.n_bytes)
    slab.check_valid()


def test_what_does_not_fit_changes_nothing(layouts: tuple[SlotLayout, ...]) -> None:
    slab = Slab(HostDevice(), layouts, 30_000)
    slab.apply([2, 2, 1])
    places = slab.places(1)
    with pytest.raises(BudgetError, match="plan for the manager's arena_bytes"):
        slab.apply([8, 8, 4])
    for slots in ([1, 1], [1, 0, 1]):
        with pytest.raises(ValueError, match="need a slot each"):
            slab.apply(slots)
    assert (slab.slots, slab.places(1)) == ((2, 2, 1), places)
    slab.check_valid()


def test_a_failed_clearing_leaves_the_ranges(layouts: tuple[SlotLayout, ...]) -> None:
    plan = FaultPlan()
    slab = Slab(FaultyDevice(HostDevice(), plan), layouts, 30_000)
    slab.apply([2, 2, 1])
    plan.arm("zero", 1)
    with pytest.raises(DeviceError, match="zero"):
        slab.apply([1, 1, 1])
    assert slab.slots == (2, 2, 1)
    slab.check_valid()


def test_copies_lie_within_the_layer(layouts: tuple[SlotLayout, ...]) -> None:
    slab = Slab(HostDevice(), layouts, 60_000)
    slab.apply([3, 3, 3])
    for layer, layout in enumerate(layouts):
        begin = slab.base + slab.places(layer)[0].offset
        seen = set()
        for slot in range(3):
            for address, source, n_bytes in slab.copies(layer, slot):
                assert begin <= address
                assert address + n_bytes <= begin + layout.range_bytes(3)
                assert source + n_bytes <= layout.block_bytes
                seen.add(address)
        assert len(seen) == 3 * len(slab.copies(layer, 0))
