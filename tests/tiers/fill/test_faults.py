"""Every way in which a fill can fail: nothing changes, nothing is half-present, and the next call works."""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest

import expertier as et
from expertier.errors import DeviceError, SourceError
from expertier.hip.faults.device import FaultyDevice
from expertier.hip.faults.plan import FaultPlan
from expertier.hip.host import HostDevice
from expertier.testing import FakeDevice, LayerShape, PatternSource, synthetic_table
from expertier.tiers.file.faulty_source import FaultySource
from model_files.gguf_files import Block, BytesSource, ModelFile, write_model

OPERATIONS = {"read": SourceError, "copy_in": DeviceError, "alloc_pinned": DeviceError}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFile:
    return write_model(tmp_path_factory.mktemp("model") / "m.gguf", [Block()])


def make(model: ModelFile, faults: FaultPlan, pool_pages: int) -> et.TierManager:
    budget = sum(demand.bytes_for(4) for demand in model.table.layer_demands())
    return et.TierManager(
        model.table,
        device=FaultyDevice(HostDevice(), faults),
        config=et.TierConfig(expert_cache_bytes=budget, host_pool_bytes=pool_pages * 4096),
        source=FaultySource(BytesSource(model.bytes), faults),
    )


@pytest.mark.parametrize("error", [None, KeyboardInterrupt, MemoryError], ids=["own", "interrupt", "memory"])
@pytest.mark.parametrize("pool_pages", [0, 1, 2, 8])
@pytest.mark.parametrize("nth", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("operation", list(OPERATIONS))
def test_a_failed_fill_leaves_everything_as_it_was(
    model: ModelFile, operation: str, nth: int, pool_pages: int, error: type[BaseException] | None
) -> None:
    faults = FaultPlan()
    tiers = make(model, faults, pool_pages)
    tiers.acquire(0, [0, 1]).release()
    held = tiers.acquire(0, [1])
    faults.arm(operation, nth, error)
    expected = error or OPERATIONS[operation]
    before = tiers.stats()
    try:
        lease = tiers.acquire(0, [1, 5, 6, 7])
    except expected:
        assert faults.injected[operation] == 1
        tiers.check_valid()
        assert set(tiers._residency.residents(0)) <= {0, 1}
        assert tiers.stats().l1.bytes_in == before.l1.bytes_in
        lease = tiers.acquire(0, [1, 5, 6, 7])
    else:
        assert faults.injected[operation] == 0
    for live in (held, lease):
        assert live.held is not None
        assert model.wrong_bytes(live, live.held) == []
        live.release()
    tiers.check_valid()
    tiers.close()
    assert tiers._device.device_bytes == tiers._device.pinned_bytes == 0


@pytest.mark.parametrize("method", ["begin_held", "complete_held"])
@pytest.mark.parametrize("experts", [[1, 5, 6], [0, 1]], ids=["misses", "hits"])
def test_an_interrupt_right_after_a_policy_call_is_undone(
    model: ModelFile, monkeypatch: pytest.MonkeyPatch, method: str, experts: list[int]
) -> None:
    tiers = make(model, FaultPlan(), 2)
    tiers.acquire(0, [0, 1]).release()
    if method == "begin_held" and experts == [0, 1]:
        method = "try_pin_hits"  # which is that for hits
    call = getattr(tiers._residency, method)

    def interrupted(*arguments: object, **named: object) -> int:
        status: int = call(*arguments, **named)
        if status != 0 and method == "try_pin_hits":
            return status
        raise KeyboardInterrupt

    monkeypatch.setattr(tiers._residency, method, interrupted)
    if method == "complete_held" and experts == [0, 1]:
        tiers.acquire(0, experts).release()  # hits complete nothing
    else:
        with pytest.raises(KeyboardInterrupt):
            tiers.acquire(0, experts)
    monkeypatch.undo()
    assert tiers._residency.pins_of(0) == [0] * 4
    tiers.check_valid()
    with tiers.acquire(0, [1, 5, 6, 7]) as lease:
        assert lease.held is not None
        assert model.wrong_bytes(lease, lease.held) == []
    tiers.close()


@pytest.mark.parametrize("operation", list(OPERATIONS))
def test_a_failed_part_leaves_the_lease_empty_but_live(model: ModelFile, operation: str) -> None:
    faults = FaultPlan()
    tiers = make(model, faults, 8)
    with tiers.acquire(0, range(8)) as lease:
        groups = lease.groups
        next(groups)
        faults.arm(operation, 2)
        with pytest.raises(OPERATIONS[operation]):
            next(groups)
        assert lease.held is None
        tiers.check_valid()
        seen = []
        for group in lease.groups:
            assert model.wrong_bytes(lease, group) == []
            seen += group.experts.tolist()
        assert sorted(seen) == list(range(8))
    tiers.check_valid()


@pytest.mark.parametrize("error", [None, KeyboardInterrupt], ids=["own", "interrupt"])
@pytest.mark.parametrize("nth", [2, 3])
def test_a_copy_that_fails_halfway_leaves_nothing_queued_that_reads_the_block(
    nth: int, error: type[BaseException] | None
) -> None:
    table = synthetic_table([LayerShape(types=("Q4_0", "Q4_0", "Q8_0"))])
    assert table.slot_layouts[0].stride == 0, "an expert has to be several copies"
    faults, device = FaultPlan(), FakeDevice()
    config = et.TierConfig(
        expert_cache_bytes=sum(demand.bytes_for(2) for demand in table.layer_demands()),
        host_pool_bytes=4096,
        fill_threads=0,
    )
    source = PatternSource()
    tiers = et.TierManager(table, device=FaultyDevice(device, faults), config=config, source=source)
    faults.arm("copy_in", nth, error)
    with pytest.raises(error or DeviceError):
        tiers.acquire(0, [3], stream=0)
    assert not any(device.queued(stream) for stream in device.streams)
    with tiers.acquire(0, [4], stream=0):  # through the same block of host memory
        device.synchronize()
        tiers.check_valid()
    tiers.close()
    device.close()


def test_a_real_file_that_is_cut_is_refused_and_what_was_fetched_before_serves(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m.gguf", [Block()])
    budget = sum(demand.bytes_for(4) for demand in model.table.layer_demands())
    config = et.TierConfig(expert_cache_bytes=budget, host_pool_bytes=0)
    with HostDevice() as device, et.TierManager(model.table, device=device, config=config) as tiers:
        tiers.acquire(0, [1, 2]).release()
        last = max(offset for offset, _ in model.table.span(0, 7))
        with model.path.open("r+b") as file:
            file.truncate(last + 10)
        for experts in ([1, 7], [1, 2, 3]):  # 7 is cut, and 3 is whole, of a file that is another now
            with pytest.raises(SourceError, match=r"m\.gguf: asked for .* its size was"):
                tiers.acquire(0, experts)
            tiers.check_valid()
        with tiers.acquire(0, [1, 2]) as lease:
            assert lease.held is not None
            assert model.wrong_bytes(lease, lease.held) == []
        model.path.write_bytes(model.bytes)
        with pytest.raises(SourceError, match=r"m\.gguf: .* it was written to"):
            tiers.acquire(0, [7])


@pytest.mark.parametrize("error", [None, KeyboardInterrupt], ids=["own", "interrupt"])
def test_a_stream_that_cannot_be_held_leaves_the_slots_unpinned(error: type[BaseException] | None) -> None:
    table = synthetic_table([LayerShape()])
    faults, device = FaultPlan(), FakeDevice()
    config = et.TierConfig(
        expert_cache_bytes=sum(demand.bytes_for(2) for demand in table.layer_demands()),
        host_pool_bytes=4096,
        fill_threads=0,
    )
    tiers = et.TierManager(table, device=FaultyDevice(device, faults), config=config, source=PatternSource())
    faults.arm("stream_wait_event", 1, error)
    with pytest.raises(error or DeviceError) as caught:
        tiers.acquire(0, [3], stream=0)
    traceback.clear_frames(caught.tb)  # they keep fences, and so events of the device
    assert tiers._residency.pins_of(0) == [0, 0]
    tiers.check_valid()
    with tiers.acquire(0, [3, 4], stream=0):
        device.synchronize()
    tiers.close()
    device.close()


def test_a_part_that_its_stream_refuses_is_let_go(monkeypatch: pytest.MonkeyPatch, model: ModelFile) -> None:
    """The lease then holds nothing, and can be released."""
    device = FakeDevice()
    budget = sum(demand.bytes_for(2) for demand in model.table.layer_demands())
    config = et.TierConfig(expert_cache_bytes=budget, host_pool_bytes=0)
    with et.TierManager(model.table, device=device, config=config, source=BytesSource(model.bytes)) as tiers:
        lease = tiers.acquire(0, [0, 1, 2, 3])
        groups = lease.groups
        next(groups)

        def refuse(*_: object) -> None:
            raise DeviceError("no")

        with monkeypatch.context() as patch:
            patch.setattr(tiers._fences, "before_read", refuse)
            with pytest.raises(DeviceError, match="no"):
                next(groups)
        assert lease.held is None
        assert not tiers._residency.pins.any()
        lease.release()
        tiers.check_valid()
    device.close()
