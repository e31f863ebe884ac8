"""The filling of the host pool: to the last free block and no further, in nobody's way, and never an error."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import expertier as et
from expertier.hip.device import Device
from expertier.hip.host import HostDevice
from expertier.testing import (
    FakeClock,
    FakeDevice,
    FaultPlan,
    FaultyDevice,
    FaultySource,
    LayerShape,
    PatternSource,
    synthetic_table,
)
from expertier.tiers.file.byte_source import ByteSource
from expertier.tiers.fill.pool_filling import REST_S, FillingState
from expertier.tiers.fill.warm_start import fill_order
from expertier.tiers.host_pool.chunk_size import block_size
from failures.held_source import HeldSource
from limits.waits import Running, wait_until

TABLE = synthetic_table([LayerShape(n_experts=12), LayerShape(n_experts=8), LayerShape(n_experts=4)])
SLOTS = 4
ALL = {(layer, expert) for layer, those in enumerate(TABLE.layers) for expert in range(those.n_experts)}
UNIT = block_size(TABLE.slot_layouts[0].block_bytes)


def make(
    source: ByteSource | None = None,
    *,
    pool: int = 1 << 20,
    threads: int = 0,
    fill: bool | str = True,
    device: Device | None = None,
) -> et.TierManager:
    config = et.TierConfig(
        expert_cache_bytes=sum(demand.bytes_for(SLOTS) for demand in TABLE.layer_demands()),
        host_pool_bytes=pool,
        fill_threads=threads,
        fill_pool=fill,  # type: ignore[arg-type]
    )
    device = device if device is not None else HostDevice()
    return et.TierManager(
        TABLE, device=device, config=config, source=source if source is not None else PatternSource()
    )


def copies(tiers: et.TierManager) -> set[tuple[int, int]]:
    return {key for key, _ in tiers._pool.copies()}


@pytest.fixture
def held() -> Iterator[HeldSource]:
    source = HeldSource()
    yield source
    source.open.set()


def test_it_brings_everyone_and_whoever_comes_then_reads_nothing() -> None:
    with make() as tiers:
        tiers.drain()
        assert copies(tiers) == ALL
        before = tiers.stats()
        assert before.l2.ahead_fills == len(ALL)
        assert before.l2.ahead_bytes == before.file.bytes_read == TABLE.expert_bytes_total
        assert before.l2.hits == before.l2.misses == 0
        tiers.acquire(0, [7, 3]).release()
        after = tiers.stats()
        assert (after.file, after.l2.hits, after.l2.ahead_fills) == (before.file, 2, len(ALL))
        tiers.check_valid()


def test_who_has_a_slot_comes_last_and_not_at_all_where_it_keeps_it() -> None:
    with make(fill=False) as tiers:
        tiers.acquire(0, [9]).release()
        tiers.acquire(2, [0, 3]).release()
        tiers.resize_host_pool(0)
        tiers.resize_host_pool(1 << 20)
        assert copies(tiers) == set(), "the copies that they came through are gone"
        tiers.fill_host_pool()
        source = tiers._parts.source
        order: list[int] = []
        read_into = source.read_into
        source.read_into = lambda span, buffer: (order.append(span.offset), read_into(span, buffer))[1]  # type: ignore[method-assign]
        tiers.drain()
        assert copies(tiers) == ALL - {(2, 0), (2, 3)}
        first = {TABLE.span(*key)[0].offset: key for key in ALL}
        came = [first[offset] for offset in order if offset in first]
        assert came[-3:] == [(2, 1), (2, 2), (0, 9)], came
        assert came[:4] == [(0, 0), (1, 0), (0, 1), (1, 1)], "the layers take turns"


def test_a_small_pool_takes_what_fits_and_evicts_nothing() -> None:
    with make(pool=7 * UNIT, fill=False) as tiers:
        tiers.acquire(1, [5, 6]).release()
        tiers.fill_host_pool()
        tiers.drain()
        assert tiers._parts.filling.state is FillingState.RESTS
        assert copies(tiers) >= {(1, 5), (1, 6)}
        assert len(copies(tiers)) == 7
        stats = tiers.stats().l2
        assert stats.evictions == 0
        assert stats.peak_bytes <= 7 * UNIT
        assert stats.ahead_fills == 5
        tiers.acquire(0, [11]).release()
        assert copies(tiers) >= {(1, 5), (1, 6), (0, 11)}, "what was filled goes before what was used"


def test_a_profile_says_who_comes_first() -> None:
    uses = np.zeros((3, 12))
    uses[1, :8] = np.arange(8) + 1
    uses[0, 11] = 20
    with make(pool=3 * UNIT, fill=False) as tiers:
        tiers.fill_host_pool(uses)
        tiers.drain()
        assert copies(tiers) == {(0, 11), (1, 7), (1, 6)}


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.data())
def test_the_order_has_everyone_once_and_shares_a_pool_between_the_layers(
    sizes: list[int], data: st.DataObject
) -> None:
    layers = synthetic_table([LayerShape(n_experts=n) for n in sizes]).layers
    order = fill_order(layers)
    assert sorted(order) == [(layer, expert) for layer, n in enumerate(sizes) for expert in range(n)]
    cut = order[: data.draw(st.integers(0, len(order)))]
    shares = [sum(key[0] == layer for key in cut) for layer in range(len(sizes))]
    for share, n in zip(shares, sizes, strict=True):
        assert share == n or share >= max(shares) - 1
    uses = np.array(data.draw(st.lists(st.lists(st.integers(0, 3), min_size=9, max_size=9), min_size=5)))
    ranked = [uses[key] for key in fill_order(layers, uses)]
    assert ranked == sorted(ranked, reverse=True)


def test_nothing_begins_while_somebody_waits_and_it_goes_on_after(held: HeldSource) -> None:
    with make(held, threads=2, fill=False) as tiers:
        held.open.clear()
        asking = Running(tiers.acquire, 0, [7])
        wait_until(lambda: held.reads == 1)
        tiers.fill_host_pool()
        wait_until(lambda: tiers._parts.filling.state is FillingState.PAUSED)
        wait_until(lambda: not tiers._parts.workers._background_running)
        assert tiers._parts.workers.n_waiting == 0
        assert held.reads == 1
        held.open.set()
        asking.outcome().release()
        tiers.drain()
        assert copies(tiers) == ALL


def test_who_asks_waits_for_no_more_than_the_one_that_is_under_way(held: HeldSource) -> None:
    """With one thread that the filling uses, and no let for any read but those of who asks."""
    held.open.clear()
    with make(held, threads=1) as tiers:
        wait_until(lambda: held.reads >= 1)
        asking = Running(tiers.acquire, 1, [0])
        wait_until(lambda: held.reads == 2)
        held.let(2 * 3)
        asking.outcome().release()
        wait_until(lambda: tiers._parts.filling.state is not FillingState.PAUSED)
        assert tiers.stats().l2.ahead_fills <= 1
        held.open.set()
        tiers.drain()
        assert copies(tiers) == ALL
        assert tiers.stats().file.bytes_read == TABLE.expert_bytes_total, "nothing is read twice"


def test_prefetches_go_first(held: HeldSource) -> None:
    held.open.clear()
    with make(held, threads=1) as tiers:
        wait_until(lambda: held.reads == 1)
        tiers.prefetch(0, [10, 11], into="l2")
        held.let(3 * 3)
        wait_until(lambda: held.reads == 10)
        assert {(0, 10), (0, 11)} <= copies(tiers)
        assert tiers.stats().l2.ahead_fills == 1
        assert tiers.cancel_prefetches() == 0
        held.open.set()
        tiers.drain()
        assert copies(tiers) == ALL, "it is no prefetch, and not cancelled with them"


def test_close_waits_for_the_one_under_way_only(held: HeldSource) -> None:
    held.open.clear()
    tiers = make(held, threads=2)
    wait_until(lambda: held.reads == 1)
    closing = Running(tiers.close)
    wait_until(lambda: tiers._usage._closed)
    held.let(3)
    closing.outcome()
    assert held.reads == 3, "one expert of three matrices"
    assert tiers._device.device_bytes == tiers._device.pinned_bytes == 0
    assert tiers._parts.filling.state is FillingState.STOPPED


def test_a_move_of_the_boundary_goes_first(held: HeldSource) -> None:
    held.open.clear()
    with make(held, threads=1) as tiers:
        wait_until(lambda: held.reads == 1)
        moving = Running(tiers.reserve_compute, 1 << 10)
        moving.must_wait_in("reserve_compute")
        held.let(3)
        moving.outcome()
        assert tiers.stats().moves.moves == 1
        assert tiers.stats().l2.ahead_fills == 1
        held.open.set()
        tiers.drain()
        assert copies(tiers) == ALL


@pytest.mark.parametrize("nth", [1, 2, 5, 3 * len(ALL)])
@pytest.mark.parametrize("threads", [0, 2])
def test_an_error_of_reading_ends_it_with_a_warning(
    nth: int, threads: int, caplog: pytest.LogCaptureFixture
) -> None:
    faults = FaultPlan()
    with make(FaultySource(PatternSource(), faults), threads=threads, fill=False) as tiers:
        faults.arm("read", nth)
        tiers.fill_host_pool()
        tiers.drain()
        assert tiers._parts.filling.state is FillingState.STOPPED
        assert len(copies(tiers)) == tiers.stats().l2.ahead_fills == (nth - 1) // 3
        warned = [record.message for record in caplog.records if record.name.endswith("pool_filling")]
        assert len(warned) == 1
        assert warned[0].endswith(f"injected fault: call {nth} of read")
        tiers.check_valid()
        tiers.acquire(0, [1, 11]).release()
        tiers.fill_host_pool()
        tiers.drain()
        assert copies(tiers) == ALL, "it can be started again"


def test_a_refused_allocation_ends_it_too(caplog: pytest.LogCaptureFixture) -> None:
    faults = FaultPlan()
    device = FaultyDevice(FakeDevice(), faults)
    with make(device=device, fill=False) as tiers:
        faults.arm("alloc_pinned", 2)
        tiers.fill_host_pool()
        tiers.drain()
        assert tiers._parts.filling.state is FillingState.STOPPED
        assert "is not filled in the background any more" in caplog.text
        tiers.check_valid()
    device.close()


def test_an_interrupt_is_raised_where_there_are_no_threads() -> None:
    faults = FaultPlan()
    with make(FaultySource(PatternSource(), faults)) as tiers:
        faults.arm("read", 4, KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            tiers.drain()
        tiers.drain()
        assert len(copies(tiers)) == 1
        tiers.check_valid()


def test_it_goes_on_when_the_pool_is_given_more_room() -> None:
    with make(pool=3 * UNIT) as tiers:
        tiers.drain()
        assert len(copies(tiers)) == 3
        tiers.resize_host_pool(9 * UNIT)
        tiers.drain()
        assert len(copies(tiers)) == 9
    with make(pool=0) as tiers:
        tiers.drain()
        assert tiers.stats().file.reads == 0
        tiers.resize_host_pool(5 * UNIT)
        tiers.drain()
        assert len(copies(tiers)) == 5


def test_what_was_given_back_is_fetched_again_when_somebody_misses_it_and_not_at_every_miss() -> None:
    clock = FakeClock()
    with make(fill=False) as tiers:
        tiers._parts.filling._clock = clock
        tiers.fill_host_pool()
        tiers.drain()
        budget = tiers._pool._budget
        tiers._pool.resize(2 * UNIT)
        tiers._pool.resize(1 << 20)
        left = len(copies(tiers))
        assert left <= 2
        assert budget.used_bytes <= 2 * UNIT + tiers.stats().l2.rounding_bytes
        tiers.acquire(0, [3]).release()
        tiers.drain()
        assert len(copies(tiers)) <= left + 1, "it has looked just now"
        clock.advance(REST_S)
        tiers.acquire(0, [4]).release()
        tiers.drain()
        assert copies(tiers) == ALL
        n_reads = tiers.stats().file.reads
        clock.advance(REST_S)
        tiers.acquire(0, [5]).release()
        assert not tiers._parts.workers.n_waiting, "nothing has left since"
        assert tiers.stats().file.reads == n_reads


def test_it_says_when_it_begins_and_ends_and_nothing_in_between(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with make(pool=3 * UNIT) as tiers:
        tiers.drain()
        tiers.resize_host_pool(6 * UNIT)
        tiers.drain()
    lines = [record.message for record in caplog.records if record.name.endswith("pool_filling")]
    assert len(lines) == 2
    assert lines[0].startswith("filling the host pool from the file in the background")
    assert lines[1].startswith("filled the host pool with 3 experts in the background in 0.")
    assert lines[1].endswith("no room is left")


@pytest.mark.parametrize(
    ("device", "threads", "fill", "fills"),
    [
        (HostDevice, 2, "auto", False),
        (HostDevice, 2, True, True),
        (FakeDevice, 2, "auto", True),
        (FakeDevice, 2, False, False),
        (FakeDevice, 0, "auto", False),
    ],
)
def test_auto_is_where_a_copy_is_nearer_than_the_page_cache(
    device: Callable[[], Device], threads: int, fill: bool | str, fills: bool
) -> None:
    opened = device()
    with make(device=opened, threads=threads, fill=fill) as tiers:
        tiers.drain()
        assert copies(tiers) == (ALL if fills else set())
    opened.close()
