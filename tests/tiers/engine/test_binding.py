"""An engine's side of the tiers: the policy's native calls under the shared locks, and `fill`."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import partial

import numba
import numpy as np
import numpy.typing as npt
import pytest

import expertier as et
from expertier.errors import BusyError, SourceError
from expertier.hip.faults.plan import FaultPlan
from expertier.hip.host import HostDevice
from expertier.planner.policy.calls.native import entry_points
from expertier.testing.unlocked_calls import unlocked
from expertier.tiers.engine.binding import EngineBinding
from expertier.tiers.file.faulty_source import FaultySource
from limits.at_once import run_at_once
from model_files.gguf_files import Block, BytesSource, ModelFile, write_model

pytestmark = pytest.mark.skipif(bool(numba.config.DISABLE_JIT), reason="NUMBA_DISABLE_JIT is set")

I32 = npt.NDArray[np.int32]
POINTER = ctypes.POINTER(ctypes.c_int32)
ADDRESS = ctypes.c_void_p


class Engine:
    """What the C++ plugin does, over ctypes: mutex and condition by address, policy by function pointer."""

    def __init__(self, tiers: et.TierManager, binding: EngineBinding) -> None:
        self.tiers = tiers
        self.binding = binding
        points = entry_points()
        on_slots = ctypes.CFUNCTYPE(ctypes.c_int32, ADDRESS, ctypes.c_int32, POINTER, ctypes.c_int32)
        self._begin = ctypes.CFUNCTYPE(
            ctypes.c_int32, ADDRESS, ctypes.c_int32, POINTER, ctypes.c_int32, POINTER, POINTER
        )(points.begin)
        self._complete, self._abort, self._release = (
            on_slots(address) for address in (points.complete, points.abort, points.release)
        )
        self._libc = ctypes.CDLL(None)

    def _mutex(self, layer: int) -> ctypes.c_void_p:
        return ADDRESS(self.binding.locks_address + 128 * layer)

    def _condition(self, layer: int) -> ctypes.c_void_p:
        return ADDRESS(self.binding.locks_address + 128 * layer + 64)

    def _change(self, layer: int, function: object, slots: I32) -> None:
        self._libc.pthread_mutex_lock(self._mutex(layer))
        status = function(self.binding.directory_address, layer, slots.ctypes.data_as(POINTER), len(slots))
        self._libc.pthread_cond_broadcast(self._condition(layer))
        self._libc.pthread_mutex_unlock(self._mutex(layer))
        assert status >= 0

    def take(self, layer: int, experts: I32) -> I32:
        slots, miss_index = np.full(len(experts), -1, np.int32), np.zeros(len(experts), np.int32)
        pointers = [array.ctypes.data_as(POINTER) for array in (experts, slots, miss_index)]
        self._libc.pthread_mutex_lock(self._mutex(layer))
        while True:
            misses = self._begin(
                self.binding.directory_address, layer, pointers[0], len(experts), pointers[1], pointers[2]
            )
            if misses != -1:
                break
            self._libc.pthread_cond_wait(self._condition(layer), self._mutex(layer))
        self._libc.pthread_mutex_unlock(self._mutex(layer))
        assert misses >= 0
        if misses:
            missing = miss_index[:misses]
            try:
                self.tiers.engine.fill(layer, experts[missing], slots[missing])
            except Exception:
                self._change(layer, self._abort, slots)
                raise
            self._change(layer, self._complete, slots)
        return slots

    def release(self, layer: int, slots: I32) -> None:
        self._change(layer, self._release, slots)

    def read(self, layer: int, matrix: int, slot: int, n_bytes: int) -> bytes:
        entry = self.binding.layers[layer].matrices[matrix]
        return ctypes.string_at(
            self.binding.slab_base + entry.offset_from_slab_base + slot * entry.stride, n_bytes
        )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFile:
    blocks = [None, Block(), Block(n_experts=6, types=("Q4_0", "Q4_0", "Q8_0"))]
    return write_model(tmp_path_factory.mktemp("model") / "m.gguf", blocks)


@pytest.fixture
def faults() -> FaultPlan:
    return FaultPlan()


@pytest.fixture
def tiers(model: ModelFile, faults: FaultPlan) -> Iterator[et.TierManager]:
    budget = sum(demand.bytes_for(4) for demand in model.table.layer_demands())
    with (
        HostDevice() as device,
        et.TierManager(
            model.table,
            device=device,
            config=et.TierConfig(expert_cache_bytes=budget, host_pool_bytes=20_000),
            source=FaultySource(BytesSource(model.bytes), faults),
        ) as tiers,
    ):
        yield tiers


def assert_bytes(model: ModelFile, engine: Engine, layer: int, experts: I32, slots: I32) -> None:
    for expert, slot in zip(experts.tolist(), slots.tolist(), strict=True):
        for number, expected in enumerate(model.matrix_bytes(layer, expert)):
            assert engine.read(layer, number, slot, len(expected)) == expected, (layer, expert, number)


def test_the_binding_describes_slots_and_tensors(model: ModelFile, tiers: et.TierManager) -> None:
    binding = tiers.engine.bind()
    assert [layer.block for layer in binding.layers] == [1, 2]
    assert [(layer.n_experts, layer.n_slots) for layer in binding.layers] == [(8, 4), (6, 4)]
    for bound, layer in zip(binding.layers, model.table.layers, strict=True):
        for found, matrix in zip(bound.matrices, layer.matrices, strict=True):
            assert (found.name, found.ggml_type, found.ne0, found.ne1) == (
                matrix.name,
                matrix.ggml_type,
                matrix.ne0,
                matrix.ne1,
            )
            end = found.offset_from_slab_base + bound.n_slots * found.stride
            assert 0 <= found.offset_from_slab_base < end <= binding.slab_bytes
    tiers.engine.unbind()


def test_an_engine_sees_the_files_bytes(model: ModelFile, tiers: et.TierManager) -> None:
    engine = Engine(tiers, tiers.engine.bind())
    rng = np.random.default_rng(0)
    for _ in range(100):
        layer = int(rng.integers(2))
        experts = rng.permutation(6)[: rng.integers(1, 5)].astype(np.int32)
        slots = engine.take(layer, experts)
        assert_bytes(model, engine, layer, experts, slots)
        engine.release(layer, slots)
        tiers.check_valid()
    stats = tiers.stats()
    assert stats.l1.misses == stats.l2.hits + stats.l2.misses
    assert stats.l2.hits > 0
    tiers.engine.unbind()


def test_while_bound_nothing_moves(model: ModelFile, tiers: et.TierManager) -> None:
    engine = Engine(tiers, tiers.engine.bind())
    plan = et.plan_layers(model.table.layer_demands(), budget_bytes=tiers.arena_bytes)
    with pytest.raises(BusyError, match="cannot close while an engine is bound"):
        tiers.close()
    with pytest.raises(BusyError, match="cannot apply a plan while an engine is bound"):
        tiers.apply(plan)
    with pytest.raises(BusyError, match="bound already"):
        tiers.engine.bind()
    slots = engine.take(0, np.array([1, 2], np.int32))
    with pytest.raises(BusyError, match="still holds 2 slots"):
        tiers.engine.unbind()
    engine.release(0, slots)
    tiers.engine.unbind()
    tiers.engine.unbind()
    tiers.apply(plan)


def test_a_lease_is_no_engines_pin(tiers: et.TierManager) -> None:
    tiers.engine.bind()
    with tiers.acquire(0, [1, 2]):
        tiers.engine.unbind()
    tiers.check_valid()


def test_a_failed_fill_is_kept_and_the_next_call_works(
    model: ModelFile, tiers: et.TierManager, faults: FaultPlan
) -> None:
    engine = Engine(tiers, tiers.engine.bind())
    experts = np.array([3, 4], np.int32)
    faults.arm("read", 5)
    with pytest.raises(SourceError) as caught:
        engine.take(0, experts)
    assert tiers.engine.last_error is caught.value
    tiers.check_valid()
    slots = engine.take(0, experts)
    assert_bytes(model, engine, 0, experts, slots)
    engine.release(0, slots)
    tiers.engine.unbind()
    tiers.engine.bind()
    assert tiers.engine.last_error is None
    tiers.engine.unbind()


@pytest.mark.parametrize(
    ("layer", "experts", "slots"),
    [
        (0, [5], [1]),
        (0, [4], [0]),
        (0, [3], [1]),
        (0, [3], [4]),
        (0, [3], [-1]),
        (0, [3, 4], [0]),
        (2, [3], [0]),
        (1, [3], [0]),
    ],
)
def test_a_fill_that_begin_did_not_ask_for_is_refused(
    tiers: et.TierManager, layer: int, experts: list[int], slots: list[int]
) -> None:
    residency = tiers._residency
    chosen = np.full(1, -1, np.int32)
    assert unlocked(residency).begin(0, np.array([3], np.int32), chosen, np.zeros(1, np.int32)) == 1
    assert chosen.tolist() == [0]
    with pytest.raises(ValueError, match="`begin` did not choose these slots for these experts"):
        tiers.engine.fill(layer, experts, slots)
    tiers.engine.fill(0, [3], [0])
    unlocked(residency).complete(0, chosen)
    with pytest.raises(ValueError, match="or the fills are complete already"):
        tiers.engine.fill(0, [3], [0])
    unlocked(residency).release(0, chosen)
    tiers.check_valid()


def test_engine_threads_and_python_leases_share_the_layers(model: ModelFile, tiers: et.TierManager) -> None:
    engine = Engine(tiers, tiers.engine.bind())

    def run(number: int) -> None:
        rng = np.random.default_rng(number)
        for _ in range(120):
            layer = int(rng.integers(2))
            experts = rng.permutation(6)[: rng.integers(1, 3)].astype(np.int32)
            if number % 2:
                slots = engine.take(layer, experts)
                assert_bytes(model, engine, layer, experts, slots)
                engine.release(layer, slots)
            else:
                with tiers.acquire(layer, experts) as lease:
                    for group in lease.groups:
                        assert model.wrong_bytes(lease, group) == []

    run_at_once([partial(run, number) for number in range(6)])
    tiers.check_valid()
    tiers.engine.unbind()
    tiers.check_valid()
