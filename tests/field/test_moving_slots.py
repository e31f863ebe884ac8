"""Slots that move, fill ahead, and are read by queued work.

Each test bears the number of its row in docs/field-failures.md. They run on a fake device whose streams advance
only when told to, and whose copies read their source when they run.
"""

from __future__ import annotations

import ctypes
import itertools
from functools import partial

import numpy as np

import expertier as et
from expertier.testing import FakeDevice, LayerShape, PatternSource, synthetic_table
from expertier.tiers.access.lease import ExpertGroup

TABLE = synthetic_table([LayerShape(n_experts=16), LayerShape(n_experts=16, n_ff=64)])
SLOTS = 4
SOURCE = PatternSource()


def make(device: FakeDevice, pool_blocks: int = 64) -> et.TierManager:
    budget = sum(demand.bytes_for(SLOTS) for demand in TABLE.layer_demands())
    config = et.TierConfig(expert_cache_bytes=budget, host_pool_bytes=pool_blocks * 16384, fill_threads=0)
    return et.TierManager(TABLE, device=device, config=config, source=SOURCE)


def wrong(device: FakeDevice, tiers: et.TierManager, layer: int, group: ExpertGroup | None) -> list[int]:
    """The experts of a group whose bytes, as they are now, are not the model's."""
    assert group is not None
    found = set()
    for matrix, place in zip(TABLE.layers[layer].matrices, tiers._slab.places(layer), strict=True):
        for expert, slot in zip(group.experts.tolist(), group.slots.tolist(), strict=True):
            address = tiers._slab.base + place.offset + slot * place.stride
            if device.read(address, matrix.expert_bytes) != SOURCE.expected(matrix.span(expert)):
                found.add(expert)
    return sorted(found)


def look(seen: list[list[int]], device: FakeDevice, tiers: et.TierManager, group: ExpertGroup | None) -> None:
    """A kernel that reads the slots of a group of layer 0 when it runs."""
    seen.append(wrong(device, tiers, 0, group))


def test_row_05_no_block_and_no_slot_is_reused_under_queued_work():
    """Kernels and copies are queued, and run late: each must still find its own bytes, in slots and in blocks."""
    for pool_blocks in (0, 2, 64):
        device = FakeDevice()
        tiers = make(device, pool_blocks)
        streams = [device.create_stream() for _ in range(2)]
        seen: list[list[int]] = []
        for step, stream in zip(range(40), itertools.cycle(streams), strict=False):
            lease = tiers.acquire(0, [(3 * step) % 16, (3 * step + 1) % 16], stream=stream)
            device.launch(partial(look, seen, device, tiers, lease.held), stream)
            lease.release()
        device.synchronize()
        assert seen == [[]] * 40
        tiers.close()
        for stream in streams:
            device.destroy_stream(stream)
        device.close()


def test_row_07_what_computes_and_what_holds_experts_stay_apart():
    """Whoever writes to all of the compute region, whenever it runs, changes no expert."""
    device = FakeDevice()
    tiers = make(device)
    stream = device.create_stream()
    for n_bytes in (4000, 20_000, 3000, 25_000):
        for layer in range(2):
            tiers.acquire(layer, range(4), stream=stream).release()
        region = tiers.reserve_compute(n_bytes, stream=stream)
        device.launch(lambda region=region: ctypes.memset(region.address, 0xEE, region.n_bytes), stream)
        for layer in range(2):
            with tiers.acquire(layer, [0, 1][: tiers.slots[layer]], stream=stream) as lease:
                device.synchronize()
                assert wrong(device, tiers, lease.layer, lease.held) == []
        tiers.release_compute()
        tiers.lower_boundary()
    tiers.close()
    device.destroy_stream(stream)
    device.close()


def test_row_11_the_slots_come_back_in_whatever_order_memory_was_asked_for():
    """What is left for slots depends on what is reserved now, and not on what was when they were sized."""
    needs = (0, 4000, 12_000, 20_000)
    after: dict[int, set[tuple[int, ...]]] = {need: set() for need in needs}
    for order in itertools.permutations(needs):
        device = FakeDevice()
        tiers = make(device)
        for need in order:
            tiers.reserve_compute(need)
            tiers.release_compute(need)
            tiers.lower_boundary()
            after[need].add(tiers.slots)
        tiers.close()
        device.close()
    assert all(len(slots) == 1 for slots in after.values()), after
    assert after[0] == {(SLOTS, SLOTS)}


def test_row_24_a_move_takes_along_or_forgets_and_leaves_nothing_stale():
    """After every move an expert is where the tables say, or they do not name it at all."""
    device = FakeDevice()
    tiers = make(device)
    rng = np.random.default_rng(0)
    for step in range(30):
        layer = int(rng.integers(2))
        with tiers.acquire(layer, rng.permutation(16)[:3].astype(np.int32)) as lease:
            assert wrong(device, tiers, lease.layer, lease.held) == []
        tiers.reserve_compute(int(rng.integers(0, 25_000)))
        if step % 3 == 0:
            tiers.release_compute()
            tiers.lower_boundary()
        tiers.check_valid()
    assert tiers.stats().moves.moves > 5
    tiers.close()
    device.close()


def test_row_33_a_profile_warms_the_slots_before_anyone_asks():
    """With a profile the first requests are hits, as far as the profile knows what comes."""
    device = FakeDevice()
    tiers = make(device)
    uses = np.zeros((2, 16))
    uses[:, [2, 5, 7, 11]] = 10, 40, 30, 20
    tiers.warm_start(uses)
    tiers.drain()
    for layer in range(2):
        with tiers.acquire(layer, [5, 7, 11]) as lease:
            assert wrong(device, tiers, lease.layer, lease.held) == []
    assert (tiers.stats().l1.hits, tiers.stats().l1.misses) == (6, 0)
    tiers.close()
    device.close()
