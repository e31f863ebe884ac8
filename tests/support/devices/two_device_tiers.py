"""Tiers on two devices at once, with bytes that can be checked: for real GPUs and for fake drivers."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence

import expertier as et
from expertier.hip.device import Device
from expertier.testing.pattern_source import PatternSource
from expertier.testing.synthetic_table import LayerShape, synthetic_table
from expertier.tiers.config.budget import all_copies_bytes
from expertier.tiers.layer_division import DeviceShare, LayerDivision
from expertier.tiers.model.slot_layout import GUARD_BYTES
from expertier.tiers.tier_set import TierSet
from limits.waits import joined

LAYERS, EXPERTS, SLOTS = 5, 12, 4
CUT = 2


def check_both(devices: Sequence[Device], rounds: int = 3) -> None:
    """Use all experts of a model whose layers lie on both, on a thread each, and compare what is in the slots."""
    shape = LayerShape(EXPERTS, 512, 256, ("Q8_0", "Q8_0", "Q4_0"))
    table, source = synthetic_table([shape] * LAYERS, top_k=2), PatternSource(3)
    config = et.TierConfig(
        expert_cache_bytes=sum(demand.bytes_for(SLOTS) for demand in table.layer_demands()),
        host_pool_bytes=4 * all_copies_bytes(table),
    )
    shares = [DeviceShare(devices[0], tuple(range(CUT))), DeviceShare(devices[1], tuple(range(CUT, LAYERS)))]
    failures: list[BaseException] = []
    with TierSet(LayerDivision(table, shares), config=config, source=source) as tiers:

        def use(manager: et.TierManager, device: Device) -> None:
            try:
                for turn in range(rounds):
                    for layer in range(manager.table.n_layers):
                        for first in range(0, EXPERTS, 3):
                            check_slots(manager, device, source, layer, range(first, first + 3 - turn % 2))
                check_guards(manager, device)
            except BaseException as error:
                failures.append(error)

        threads = [
            threading.Thread(target=use, args=pair, daemon=True)
            for pair in zip(tiers.managers, devices, strict=True)
        ]
        for thread in threads:
            thread.start()
        joined(*threads)
        if failures:
            raise failures[0]
        tiers.check_valid()
        stats = tiers.stats()
        assert stats.file.bytes_read == table.expert_bytes_total, f"each expert is read once: {stats}"
        assert all(manager.stats().l1.evictions > EXPERTS for manager in tiers.managers)


def check_slots(
    manager: et.TierManager, device: Device, source: PatternSource, layer: int, experts: range
) -> None:
    """Lease experts and compare their slots with the source."""
    with manager.acquire(layer, experts) as lease:
        for group in lease.groups:
            for number, matrix in enumerate(manager.table.layers[layer].matrices):
                view = lease.view(matrix.role)
                for expert, slot in zip(group.experts.tolist(), group.slots.tolist(), strict=True):
                    found = read(device, view.address + slot * view.stride_bytes, matrix.expert_bytes)
                    expected = source.expected(manager.table.span(layer, expert)[number])
                    assert found == expected, (device.name, layer, expert, str(matrix.role))


def check_guards(manager: et.TierManager, device: Device) -> None:
    """Assert that every layer's slots end in zeros."""
    for layer, layout in enumerate(manager.table.slot_layouts):
        places = manager._slab.places(layer)
        for place in places[:1] if layout.stride else places:
            end = manager._slab.base + place.offset + manager.slots[layer] * place.stride
            assert read(device, end, GUARD_BYTES) == bytes(GUARD_BYTES), (device.name, layer)


def read(device: Device, address: int, n_bytes: int) -> bytes:
    """Return bytes of a device's memory."""
    pinned = device.alloc_pinned(n_bytes)
    try:
        device.copy_out(pinned, address, n_bytes)
        device.synchronize()
        return ctypes.string_at(pinned, n_bytes)
    finally:
        device.free(pinned)
