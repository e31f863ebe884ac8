"""The manager: leases, groups, views, plans, statistics and its end, all with real bytes."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import expertier as et
from expertier.errors import BudgetError, BusyError, DeviceError, LeaseError, SourceError
from expertier.hip.faults.device import FaultyDevice
from expertier.hip.faults.plan import FaultPlan
from expertier.hip.host import HostDevice
from expertier.planner.budget.allocate import LayerPlan
from expertier.testing import FakeDevice
from expertier.tiers.access.lease import Lease
from model_files.gguf_files import Block, ModelFile, write_model

POOL_BYTES = 3 * 4096


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFile:
    """A layer of slots in one piece, and one of arrays with an expert of another size."""
    blocks = [Block(), None, Block(n_experts=6, types=("Q4_0", "Q4_0", "Q8_0"))]
    return write_model(tmp_path_factory.mktemp("model") / "m.gguf", blocks)


def config(model: ModelFile, n_slots: int, pool_bytes: int = POOL_BYTES) -> et.TierConfig:
    demands = model.table.layer_demands()
    return et.TierConfig(
        expert_cache_bytes=sum(demand.bytes_for(n_slots) for demand in demands),
        host_pool_bytes=pool_bytes,
        fill_threads=0,
    )


@pytest.fixture
def device() -> Iterator[HostDevice]:
    with HostDevice() as device:
        yield device


@pytest.fixture
def tiers(model: ModelFile, device: HostDevice) -> Iterator[et.TierManager]:
    """Tiers with three slots a layer."""
    with et.TierManager(model.table, device=device, config=config(model, 3)) as tiers:
        yield tiers
        tiers.check_valid()


def use(model: ModelFile, tiers: et.TierManager, layer: int, experts: Iterable[int]) -> list[list[int]]:
    """Acquire, check every byte, release; the experts of each group."""
    groups = []
    with tiers.acquire(layer, experts) as lease:
        for group in lease.groups:
            assert model.wrong_bytes(lease, group) == []
            tiers.check_valid()
            groups.append(group.experts.tolist())
    tiers.check_valid()
    return groups


def test_a_lease_shows_the_files_bytes(model: ModelFile, tiers: et.TierManager) -> None:
    assert tiers.slots == (3, 3)
    assert use(model, tiers, 0, [5, 2]) == [[5, 2]]
    assert use(model, tiers, 1, [5, 2, 0]) == [[5, 2, 0]]
    assert use(model, tiers, 0, [2, 7, 1]) == [[2, 7, 1]]


def test_hits_move_nothing(model: ModelFile, tiers: et.TierManager) -> None:
    use(model, tiers, 0, [5, 2])
    before = tiers.stats()
    use(model, tiers, 0, [2, 5])
    after = tiers.stats()
    assert (after.file, after.l2, after.l1.bytes_in) == (before.file, before.l2, before.l1.bytes_in)
    assert after.l1.hits == before.l1.hits + 2


def test_an_expert_evicted_from_l1_comes_back_from_l2(model: ModelFile, device: HostDevice) -> None:
    with et.TierManager(model.table, device=device, config=config(model, 1)) as tiers:
        use(model, tiers, 0, [0])
        use(model, tiers, 0, [1])
        reads = tiers.stats().file
        use(model, tiers, 0, [0])
        stats = tiers.stats()
        assert stats.file == reads
        assert (stats.l2.hits, stats.l2.misses) == (1, 2)


def test_what_l1_evicts_becomes_young_in_l2(model: ModelFile, device: HostDevice) -> None:
    def copies(tiers: et.TierManager) -> list[int]:
        return [expert for (_, expert), _ in tiers._pool.copies()]

    with et.TierManager(model.table, device=device, config=config(model, 2)) as tiers:
        use(model, tiers, 0, [0])
        use(model, tiers, 0, [1])
        use(model, tiers, 0, [0, 1])
        assert copies(tiers) == [0, 1], "an L1 hit is no use of the copy"
        use(model, tiers, 0, [2])  # puts 0 out of L1
        assert copies(tiers) == [1, 0, 2]
        use(model, tiers, 0, [3])  # puts 2 out of L1, the coolest; the pool is full and drops 1
        assert copies(tiers) == [0, 2, 3]


def test_more_experts_than_slots_come_in_parts_resident_ones_first(
    model: ModelFile, tiers: et.TierManager
) -> None:
    use(model, tiers, 0, [6, 4])
    groups = use(model, tiers, 0, [0, 1, 4, 5, 6, 7, 2])
    assert groups == [[4, 6, 0], [1, 5, 7], [2]]


def test_a_part_is_valid_until_the_next_is_taken(model: ModelFile, tiers: et.TierManager) -> None:
    with tiers.acquire(0, range(8)) as lease:
        assert lease.n_groups == 3
        first = lease.held
        assert first is not None
        groups = lease.groups
        assert next(groups) is first
        second = next(groups)
        assert lease.held is second
        assert model.wrong_bytes(lease, second) == []
        assert next(lease.groups).experts.tolist() == first.experts.tolist(), "the groups can be taken again"
        assert model.wrong_bytes(lease, lease.held) == []
    assert lease.held is None


@pytest.mark.parametrize(
    "experts",
    [
        (1, 2, 1),
        [1, 2],
        range(1, 3),
        iter([1, 2]),
        {1: 0, 2: 0}.keys(),
        np.array([1, 2], np.int64),
        np.array([[1, 2], [2, 1]], np.int32),
        np.array([1, 1, 2], np.uint8),
        [np.int32(1), np.int64(2)],
    ],
    ids=lambda value: type(value).__name__,
)
def test_experts_come_in_any_form(model: ModelFile, tiers: et.TierManager, experts: Iterable[int]) -> None:
    assert use(model, tiers, 0, experts) == [[1, 2]]


@pytest.mark.parametrize("experts", [[], (), np.zeros((0, 4), np.int32), np.array([])])
def test_no_experts_are_a_lease_without_parts(tiers: et.TierManager, experts: Iterable[int]) -> None:
    before = tiers.stats()
    with tiers.acquire(1, experts) as lease:
        assert list(lease.groups) == []
        assert lease.n_groups == 0
    assert tiers.stats() == before


@pytest.mark.parametrize("experts", [[1.0], ["1"], np.array([1.5]), [None], "12"])
def test_experts_are_integers(tiers: et.TierManager, experts: Iterable[int]) -> None:
    with pytest.raises(TypeError):
        tiers.acquire(0, experts)
    tiers.check_valid()


@pytest.mark.parametrize(
    ("layer", "expert", "message"),
    [
        (0, 8, "expert 8 of layer 0: it has experts 0 to 7"),
        (0, -1, "expert -1 of layer 0"),
        (1, 6, "expert 6 of layer 1: it has experts 0 to 5"),
        (0, 1 << 40, "expert 1099511627776 of layer 0"),
        (2, 0, "layer 2: the model has MoE layers 0 to 1"),
        (-1, 0, "layer -1"),
    ],
)
def test_experts_that_are_not_there(tiers: et.TierManager, layer: int, expert: int, message: str) -> None:
    with pytest.raises(IndexError, match=f"asked for {message}"):
        tiers.acquire(layer, [0, expert])
    tiers.check_valid()


def test_views_describe_all_slots_of_a_matrix(model: ModelFile, tiers: et.TierManager) -> None:
    with tiers.acquire(0, [1]) as lease:
        gate, down = lease.view("gate"), lease.view("down")
        assert gate.shape == (64, 32, 3)
        assert down.shape == (32, 64, 3)
        assert gate.ggml_type == model.table.layers[0].matrices[0].ggml_type
        assert gate.stride_bytes == model.table.slot_layouts[0].stride
        with pytest.raises(ValueError, match="gate_up matrix of layer 0: it has gate, up, down"):
            lease.view("gate_up")
        with pytest.raises(ValueError, match="sideways"):
            lease.view("sideways")
    with pytest.raises(LeaseError, match="was released"):
        lease.view("gate")


def test_a_lease_is_released_once(tiers: et.TierManager) -> None:
    lease = tiers.acquire(0, [1])
    lease.release()
    assert lease.released
    with pytest.raises(LeaseError, match="layer 0 was released"):
        lease.release()
    with pytest.raises(LeaseError):
        list(lease.groups)
    with pytest.raises(LeaseError), lease:
        pass
    tiers.check_valid()


def test_release_within_the_block(tiers: et.TierManager) -> None:
    with tiers.acquire(0, [1]) as lease:
        lease.release()
    tiers.check_valid()


def test_too_many_leases_are_refused_and_change_nothing(model: ModelFile, tiers: et.TierManager) -> None:
    leases = [tiers.acquire(0, [0, 1]), tiers.acquire(0, [1])]
    with pytest.raises(BusyError, match="3 slots are unpinned, and this thread holds leases"):
        tiers.acquire(0, [2, 3])
    tiers.check_valid()
    leases.append(tiers.acquire(0, [2, 1, 0]))
    for lease in leases:
        assert lease.held is not None
        assert model.wrong_bytes(lease, lease.held) == []
        lease.release()
    assert use(model, tiers, 0, [2, 3]) == [[2, 3]]


def test_the_next_part_can_be_refused_and_taken_later(model: ModelFile, tiers: et.TierManager) -> None:
    many = tiers.acquire(0, range(8))
    groups = many.groups
    next(groups)
    list(many.groups)  # the last group has two experts and leaves a slot
    other = tiers.acquire(0, [0])
    with pytest.raises(BusyError):
        next(groups)
    assert many.held is None
    tiers.check_valid()
    other.release()
    for group, experts in zip(many.groups, [[0, 1, 2], [3, 4, 5], [6, 7]], strict=True):
        assert group.experts.tolist() == experts
        assert model.wrong_bytes(many, group) == []
    many.release()


def test_streams_belong_to_devices_that_have_them(tiers: et.TierManager) -> None:
    with pytest.raises(DeviceError, match="stream 7: device host has none"):
        tiers.acquire(0, [1], stream=7)


def test_a_plan_moves_the_slots_and_what_they_hold(model: ModelFile, tiers: et.TierManager) -> None:
    use(model, tiers, 0, [0, 1, 2])
    use(model, tiers, 1, [0, 1])
    before = tiers.stats()
    tiers.apply(LayerPlan((4, 1), 0, 0))
    tiers.check_valid()
    stats = tiers.stats()
    assert (tiers.slots, stats.l1.slots, stats.l1.evictions) == ((4, 1), 5, 1)
    assert (stats.moves.moves, stats.moves.dropped) == (1, 1)
    use(model, tiers, 0, [0, 1, 2])
    use(model, tiers, 1, [1])
    assert tiers.stats().file == before.file
    tiers.apply(et.plan_layers(model.table.layer_demands(), budget_bytes=tiers.arena_bytes))
    assert tiers.slots == (3, 3)


def test_a_plan_that_does_not_fit_changes_nothing(model: ModelFile, tiers: et.TierManager) -> None:
    use(model, tiers, 0, [0, 1, 2])
    before = tiers.stats()
    with pytest.raises(BudgetError, match=r"14 slots.*plan for the manager's arena_bytes"):
        tiers.apply(LayerPlan((8, 6), 0, 0))
    with pytest.raises(ValueError, match="need a slot each"):
        tiers.apply(LayerPlan((3,), 0, 0))
    assert (tiers.stats(), tiers.slots) == (before, (3, 3))
    use(model, tiers, 0, [0, 1, 2])
    assert tiers.stats().file == before.file


def test_a_plan_whose_clearing_fails_leaves_the_old_one(model: ModelFile) -> None:
    faults = FaultPlan()
    with et.TierManager(
        model.table, device=FaultyDevice(HostDevice(), faults), config=config(model, 3)
    ) as tiers:
        use(model, tiers, 0, [0, 1])
        faults.arm("zero", 1)
        with pytest.raises(DeviceError, match="zero"):
            tiers.apply(LayerPlan((1, 1), 0, 0))
        tiers.check_valid()
        assert tiers.slots == (3, 3)
        use(model, tiers, 0, [0, 1, 2])


def test_nothing_moves_under_a_lease(model: ModelFile, device: HostDevice) -> None:
    tiers = et.TierManager(model.table, device=device, config=config(model, 3))
    lease = tiers.acquire(1, [4])
    with pytest.raises(BusyError, match=r"cannot apply a plan while 1 leases are live, on layers \[1\]"):
        tiers.apply(LayerPlan((1, 1), 0, 0))
    with pytest.raises(BusyError, match="cannot close"):
        tiers.close()
    assert lease.held is not None
    assert model.wrong_bytes(lease, lease.held) == []
    lease.release()
    tiers.close()


def test_close_frees_everything_and_ends_the_use(model: ModelFile, device: HostDevice) -> None:
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    tiers = et.TierManager(model.table, device=device, config=config(model, 2))
    lease = tiers.acquire(0, [1])
    lease.release()
    tiers.close()
    tiers.close()
    assert device.device_bytes == device.pinned_bytes == 0
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors
    for call in (
        lambda: tiers.acquire(0, [1]),
        lambda: tiers.engine.fill(0, [1], [0]),
        lambda: tiers.apply(LayerPlan((1, 1), 0, 0)),
        tiers.engine.bind,
    ):
        with pytest.raises(LeaseError, match="were closed"):
            call()


def test_an_error_within_the_block_gets_a_note_when_closing_is_refused(
    model: ModelFile, device: HostDevice
) -> None:
    leases: list[Lease] = []

    def fail(tiers: et.TierManager) -> None:
        with tiers:
            leases.append(tiers.acquire(0, [1]))
            raise KeyError("mine")

    tiers = et.TierManager(model.table, device=device, config=config(model, 2))
    with pytest.raises(KeyError) as caught:
        fail(tiers)
    assert "cannot close while 1 leases are live" in caught.value.__notes__[0]
    leases[0].release()
    tiers.close()


@pytest.mark.parametrize("operation", ["alloc", "alloc_pinned"])
@pytest.mark.parametrize("nth", [1, 2])
def test_a_start_that_fails_leaves_nothing(model: ModelFile, operation: str, nth: int) -> None:
    host = HostDevice()
    faults = FaultPlan({operation: nth})
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    if (operation, nth) == ("alloc", 2):
        et.TierManager(model.table, device=FaultyDevice(host, faults), config=config(model, 2)).close()
    else:
        with pytest.raises(DeviceError):
            et.TierManager(model.table, device=FaultyDevice(host, faults), config=config(model, 2))
    host.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors


def test_a_file_that_changed_is_refused_at_the_start(tmp_path: Path, device: HostDevice) -> None:
    model = write_model(tmp_path / "m.gguf")
    with model.path.open("ab") as file:
        file.write(b"more")
    with pytest.raises(SourceError, match="changed after its header was read"):
        et.TierManager(model.table, device=device, config=config(model, 2))


def test_a_budget_below_the_floor_is_refused_before_anything_is_allocated(
    model: ModelFile, device: HostDevice
) -> None:
    with pytest.raises(BudgetError, match="MOE_EXPERT_CACHE_MIB to at least 1"):
        et.TierManager(model.table, device=device, config=et.TierConfig(expert_cache_bytes=1000))


def test_budgets_that_work_badly_are_said_once(
    model: ModelFile, device: HostDevice, caplog: pytest.LogCaptureFixture
) -> None:
    with et.TierManager(model.table, device=device, config=config(model, 1, 2 * 4096)) as tiers:
        use(model, tiers, 0, range(8))
    few, small = caplog.messages
    assert "layer 0 has 1 expert slots and a token uses 2 experts" in few
    assert "1 MiB of slots (MOE_EXPERT_CACHE_MIB) avoid that" in few
    assert "the host pool of 0.008 MiB is smaller than the 0.0" in small
    caplog.clear()
    with et.TierManager(model.table, device=device, config=config(model, 2, 0)):
        assert caplog.messages == []


def test_statistics_add_up(model: ModelFile, tiers: et.TierManager) -> None:
    rng = np.random.default_rng(3)
    requests = [0, 0]
    for _ in range(200):
        layer = int(rng.integers(2))
        experts = rng.integers(0, 6, int(rng.integers(0, 6)))
        requests[layer] += len(set(experts.tolist()))
        use(model, tiers, layer, experts)
    stats = tiers.stats()
    sizes = [layer.expert_bytes for layer in model.table.layers]
    assert stats.l1.hits + stats.l1.misses == sum(requests)
    assert stats.l1.misses == stats.l2.hits + stats.l2.misses
    assert stats.l1.misses - stats.l1.evictions == sum(len(tiers._residency.residents(n)) for n in range(2))
    fills = tiers._residency.fills_by_layer()
    assert stats.l1.bytes_in == fills[0] * sizes[0] + fills[1] * sizes[1]
    assert stats.file.bytes_read == stats.l2.bytes_in
    assert stats.file.reads == 3 * stats.l2.misses
    assert stats.l2.used_bytes <= stats.l2.peak_bytes <= stats.l2.budget_bytes == POOL_BYTES
    assert stats.l1.used_bytes <= stats.l1.budget_bytes == tiers.arena_bytes
    assert stats.as_dict()["l1"]["slots"] == 6
    assert set(stats.as_dict()) == {"l1", "l2", "file", "moves", "prefetch"}


def test_the_file_is_never_written(model: ModelFile) -> None:
    assert model.path.read_bytes() == model.bytes


@pytest.mark.parametrize("pool_bytes", [0, POOL_BYTES])
@pytest.mark.parametrize("streams", [False, True], ids=["host", "streams"])
def test_a_whole_layer_is_loaded_outside_the_slots(model: ModelFile, pool_bytes: int, streams: bool) -> None:
    device = FakeDevice() if streams else HostDevice()
    streaming = replace(config(model, 2, pool_bytes), stream_tokens=1)
    with device, et.TierManager(model.table, device=device, config=streaming) as tiers:
        tiers.acquire(1, [4]).release()
        before = tiers.stats().l1
        for number, layer in enumerate(model.table.layers):
            layout = model.table.slot_layouts[number]
            address = device.alloc(layout.range_bytes(layer.n_experts))
            tiers.engine.load(number, range(layer.n_experts), address)
            for expert in range(layer.n_experts):
                for matrix, place in zip(layer.matrices, layout.place(layer.n_experts), strict=True):
                    found = ctypes.string_at(
                        address + place.offset + expert * place.stride, matrix.expert_bytes
                    )
                    begin, n_bytes = matrix.span(expert)
                    assert found == model.bytes[begin : begin + n_bytes], (number, expert)
            device.free(address)
        with pytest.raises(IndexError):
            tiers.engine.load(0, [99], 0)
        assert isinstance(tiers.engine.last_error, IndexError)
        assert tiers.stats().l1 == before
        tiers.check_valid()


def test_whoever_would_wait_for_slots_must_not_hold_any(tiers: et.TierManager) -> None:
    tiers.require_no_leases_here("decode")
    with tiers.acquire(0, [1]), pytest.raises(BusyError, match="release them before you decode"):
        tiers.require_no_leases_here("decode")


def test_an_array_of_experts_may_name_one_twice(tiers: et.TierManager) -> None:
    with tiers.acquire(0, np.array([2, 1, 2], np.int32)) as lease:
        assert lease.held is not None
        assert lease.held.experts.tolist() == [2, 1]
