"""Memory of devices and of the host: who may read, reuse and refuse it.

Each test bears the number of its row in docs/field-failures.md.
"""

from __future__ import annotations

import ctypes
import threading
from ctypes import c_bool, c_size_t, c_void_p
from pathlib import Path

import pytest

import expertier as et
from engine_runs.field_tools import (
    FEW_SLOTS,
    PATIENCE_S,
    PROMPT,
    WatchedDevice,
    Workers,
    config_for,
    generated,
    stock,
    tiers_on,
    wrong_after,
)
from engine_runs.tiered_runs import assert_nothing_held, make_tiers, run_model
from expertier.engine_adapter.llama_cpp import LlamaModel
from expertier.errors import DecodeError, DeviceError
from expertier.hip.faults.device import FaultyDevice
from expertier.hip.faults.plan import FaultPlan
from expertier.hip.host import HostDevice
from expertier.planner.budget.allocate import LayerPlan
from expertier.tiers.model.slot_layout import GUARD_BYTES
from expertier.tiers.tier_set import TierSet
from expertier.units import MIB
from limits.waits import is_waiting, wait_until


def test_row_05_a_staging_block_is_not_reused_while_a_copy_reads_it(blocks):
    device = WatchedDevice()
    copying, may_go_on, wrong = threading.Semaphore(0), threading.Event(), []

    def hold_up() -> None:
        copying.release()
        assert may_go_on.wait(PATIENCE_S)

    workers = Workers()
    # The pool has no room for a block: all fills go through the two bounce blocks.
    with tiers_on(device, blocks, 6, 1) as tiers:
        device.hold_up = hold_up
        filling = [
            workers.start(lambda expert=expert: wrong.extend(wrong_after(blocks, tiers, 0, [expert])))
            for expert in range(4)
        ]
        for _ in range(2):
            assert copying.acquire(timeout=PATIENCE_S)
        try:
            wait_until(
                lambda: sum(is_waiting(thread, "begin_fill") for thread in filling) == 2, "not two fills wait"
            )
            assert not copying.acquire(blocking=False), "a third fill found a block that a copy reads"
        finally:
            may_go_on.set()
        workers.finish()
        assert wrong == []
        tiers.check_valid()


def test_row_06_every_range_on_every_device_ends_in_zeros(blocks):
    def not_zero(tiers: et.TierManager) -> list[int]:
        found = []
        for layer, n_slots in enumerate(tiers.slots):
            layout = blocks.table.slot_layouts[layer]
            places = tiers._slab.places(layer)
            for place in places[:1] if layout.stride else places:
                end = tiers._slab.base + place.offset + n_slots * place.stride
                found += [layer] * (ctypes.string_at(end, GUARD_BYTES) != bytes(GUARD_BYTES))
        return found

    with (
        HostDevice() as one,
        HostDevice() as two,
        tiers_on(one, blocks, 4) as first,
        tiers_on(two, blocks, 4) as second,
    ):
        for tiers in (first, second):
            for slots in (tiers.slots, (1, 5), (6, 1), (2, 3)):  # guards come to lie where experts were
                tiers.apply(LayerPlan(slots, 0, tiers.arena_bytes))
                for layer in range(2):
                    assert wrong_after(blocks, tiers, layer, range(6)) == []
                assert not_zero(tiers) == []


def test_row_18_no_kernel_can_read_experts_from_a_mapped_file(engine, path):
    """The model's file is not mapped while its experts are served, and the engine's own tensors have no access."""

    def mapped(file: Path) -> bool:
        return str(file) in Path("/proc/self/maps").read_text()

    def permissions(address: int) -> str:
        for line in Path("/proc/self/maps").read_text().splitlines():
            places, what = line.split()[:2]
            begin, end = (int(place, 16) for place in places.split("-"))
            if begin <= address < end:
                return what
        raise AssertionError(f"{address:#x} is not mapped")

    allocate = engine.symbol("ggml_backend_buft_alloc_buffer", c_void_p, c_void_p, c_size_t)
    get_base = engine.symbol("ggml_backend_buffer_get_base", c_void_p, c_void_p)
    free = engine.symbol("ggml_backend_buffer_free", None, c_void_p)
    is_host = engine.symbol("ggml_backend_buft_is_host", c_bool, c_void_p)
    with (
        make_tiers(path, FEW_SLOTS) as tiers,
        LlamaModel.open(engine, path, tiers=TierSet.of(tiers)) as model,
    ):
        assert (
            model.binding.counters().dropped_writes == tiers.table.expert_bytes_total
        )  # so it is in such buffers
        assert not is_host(model.binding.bindings[0].buffer_type), "kernels of the CPU would be let in"
        model.binding.begin_load()
        buffer = allocate(model.binding.bindings[0].buffer_type, MIB)
        model.binding.end_load()
        assert permissions(get_base(buffer)) == "---p"
        free(buffer)
        with model.context(n_ctx=64, n_threads=1) as context:
            context.decode(PROMPT, 0)
        assert not mapped(path)
    with LlamaModel.open(engine, path, repack=False):
        assert mapped(path), "this is how stock loads, and what the test would see"


def test_row_21_a_refused_pinned_allocation_is_an_error(engine, path):
    """It fails the batch that needed it; the experts are neither computed elsewhere nor kept in other memory."""
    table = et.ExpertTable.from_gguf(path)
    faults = FaultPlan()
    with (
        HostDevice() as inner,
        et.TierManager(
            table, device=FaultyDevice(inner, faults), config=config_for(table, FEW_SLOTS, 8 << 20)
        ) as tiers,
        LlamaModel.open(engine, path, tiers=TierSet.of(tiers)) as model,
        model.context(n_ctx=128, n_threads=1) as context,
    ):
        faults.arm("alloc_pinned", 3)
        with pytest.raises(DecodeError, match="alloc_pinned") as caught:
            context.decode(PROMPT, 0)
        assert isinstance(caught.value.__cause__, DeviceError)
        assert faults.injected["alloc_pinned"] == 1
        assert_nothing_held(tiers)
        assert inner.pinned_bytes == tiers.stats().l2.used_bytes + tiers.stats().l2.bounce_bytes
        assert generated(context, PROMPT, 4) == stock(engine, path, tuple(PROMPT), 4, 512)


def test_row_23_tiers_allocate_on_their_own_device(blocks):
    with HostDevice() as one, HostDevice() as two, tiers_on(one, blocks, 2, 4 * 4096) as first:
        assert (one.device_bytes, two.device_bytes) == (one.allocation_bytes(first.arena_bytes), 0)
        before = one.device_bytes, one.pinned_bytes
        with tiers_on(two, blocks, 5, 4 * 4096) as second:
            assert wrong_after(blocks, second, 0, range(10)) == []
            assert two.device_bytes >= second.arena_bytes > first.arena_bytes
            assert two.pinned_bytes > 0
        assert (one.device_bytes, one.pinned_bytes) == before
        assert two.device_bytes == two.pinned_bytes == 0


@pytest.mark.parametrize("host_pool_bytes", [1, 1 << 20])  # with none at all, reads go straight into slots
def test_row_30_copies_to_the_device_come_from_pinned_memory_only(engine, path, host_pool_bytes):
    table, device = et.ExpertTable.from_gguf(path), WatchedDevice()
    with et.TierManager(table, device=device, config=config_for(table, 3, host_pool_bytes)) as tiers:
        run_model(engine, path, tiers, prompt=PROMPT, n_tokens=4)
        assert device.n_copies >= tiers.stats().l1.misses > 0
        assert device.strangers == []
