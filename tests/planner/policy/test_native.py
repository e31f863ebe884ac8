"""The C entry points: called through ctypes they decide exactly as the Python methods do."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading

import numba
import numpy as np
import numpy.typing as npt
import pytest

from expertier.planner import Outcome, PolicyKind
from expertier.planner.policy.calls.native import entry_points
from expertier.planner.policy.residency import Residency
from expertier.testing.unlocked_calls import unlocked
from limits.waits import joined
from policy_runs.residency_arrays import ARRAYS

pytestmark = pytest.mark.skipif(bool(numba.config.DISABLE_JIT), reason="NUMBA_DISABLE_JIT is set")

I32 = npt.NDArray[np.int32]
POINTER = ctypes.POINTER(ctypes.c_int32)


class NativeResidency:
    """A residency's calls through the addresses that an engine gets."""

    def __init__(self, residency: Residency) -> None:
        points = entry_points()
        on_slots = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32, POINTER, ctypes.c_int32)
        self._begin = ctypes.CFUNCTYPE(
            ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32, POINTER, ctypes.c_int32, POINTER, POINTER
        )(points.begin)
        self._on_slots = {
            name: on_slots(getattr(points, name))
            for name in ("complete", "abort", "release", "resident_first")
        }
        self._prefetch = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32)(
            points.begin_prefetch
        )
        self.directory = residency.directory_address

    def begin(self, layer: int, experts: I32, slots: I32, miss_index: I32) -> int:
        pointers = [array.ctypes.data_as(POINTER) for array in (experts, slots, miss_index)]
        return int(self._begin(self.directory, layer, pointers[0], len(experts), pointers[1], pointers[2]))

    def begin_prefetch(self, layer: int, expert: int) -> int:
        return int(self._prefetch(self.directory, layer, expert))

    def call(self, name: str, layer: int, values: I32) -> int:
        return int(self._on_slots[name](self.directory, layer, values.ctypes.data_as(POINTER), len(values)))


def make(kind: PolicyKind) -> Residency:
    return Residency([16, 8, 12], [5, 8, 2], kind)


@pytest.mark.parametrize("kind", list(PolicyKind))
def test_native_and_python_calls_do_the_same(kind: PolicyKind) -> None:
    python, compiled = make(kind), make(kind)
    native = NativeResidency(compiled)
    rng = np.random.default_rng(7)
    held: list[tuple[int, I32]] = []
    outcomes = set()
    for _ in range(4000):
        layer = int(rng.integers(-1, 4))
        if held and rng.random() < 0.4:
            layer, slots = held.pop(int(rng.integers(len(held))))
            name = "release" if rng.random() < 0.8 else "abort"
            if name == "release":
                assert unlocked(python).complete(layer, slots) == native.call("complete", layer, slots)
            assert getattr(unlocked(python), name)(layer, slots) == native.call(name, layer, slots) == 0
        elif rng.random() < 0.2:
            expert = int(rng.integers(-1, 17))
            slot = unlocked(python).begin_prefetch(layer, expert)
            assert slot == native.begin_prefetch(layer, expert)
            outcomes.add(min(slot, 0))
            if slot >= 0:
                held.append((layer, np.array([slot], np.int32)))
        else:
            experts = rng.permutation(17)[: int(rng.integers(0, 7))].astype(np.int32)
            first, second = experts.copy(), experts.copy()
            assert unlocked(python).resident_first(layer, first) == native.call(
                "resident_first", layer, second
            )
            assert np.array_equal(first, second)
            results = []
            for begin in (unlocked(python).begin, native.begin):
                slots = np.full(len(experts), -1, np.int32)
                miss_index = np.full(len(experts), -1, np.int32)
                results.append(
                    (begin(layer, experts, slots, miss_index), slots.tolist(), miss_index.tolist())
                )
            assert results[0] == results[1]
            outcomes.add(min(results[0][0], 0))
            if results[0][0] >= 0:
                held.append((layer, np.array(results[0][1], np.int32)))
        for name in ARRAYS:
            assert np.array_equal(getattr(python, name), getattr(compiled, name)), name
    of_locked_calls = {Outcome.LOOK_AGAIN}  # see test_locked_calls.py
    assert outcomes == {0, *Outcome} - of_locked_calls, "the sequence should have met every outcome"
    compiled.check_valid()


def test_a_directory_of_another_version_is_refused() -> None:
    residency = make(PolicyKind.LRU)
    native = NativeResidency(residency)
    directory = np.ctypeslib.as_array(
        ctypes.cast(native.directory, ctypes.POINTER(ctypes.c_int64)), (4,)
    ).copy()
    directory[0] += 1
    native.directory = directory.ctypes.data
    one = np.zeros(1, np.int32)
    assert native.begin(0, one, one.copy(), one.copy()) == Outcome.BAD_CALL
    for name in ("complete", "abort", "release", "resident_first"):
        assert native.call(name, 0, one) == Outcome.BAD_CALL
    assert native.begin_prefetch(0, 1) == Outcome.BAD_CALL


def test_negative_counts_are_refused() -> None:
    native = NativeResidency(make(PolicyKind.LRU))
    one = np.zeros(1, np.int32).ctypes.data_as(POINTER)
    assert native._begin(native.directory, 0, one, -1, one, one) == Outcome.BAD_CALL
    for function in native._on_slots.values():
        assert function(native.directory, 0, one, -1) == Outcome.BAD_CALL


def test_entry_points_work_on_threads_that_python_did_not_start_holding_its_lock() -> None:
    residency = make(PolicyKind.LFU_DECAY)
    native = NativeResidency(residency)
    statuses: list[int] = []

    def use() -> None:
        for layer in range(3):
            slots = np.full(2, -1, np.int32)
            statuses.append(native.begin(layer, np.array([1, 2], np.int32), slots, np.zeros(2, np.int32)))

    thread = threading.Thread(target=use, daemon=True)
    thread.start()
    joined(thread)
    assert statuses == [2, 2, 2]


def test_without_compilation_there_are_no_entry_points() -> None:
    program = (
        "from expertier.errors import ConfigError\n"
        "from expertier.planner.policy.calls.native import entry_points\n"
        "try: entry_points()\n"
        "except ConfigError as error: print(error)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={"NUMBA_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert "NUMBA_DISABLE_JIT is set" in result.stdout
    assert "Unset it" in result.stdout


def test_the_second_start_compiles_nothing() -> None:
    for kind in PolicyKind:
        make(kind)  # fills the cache if it was empty
    program = (
        "import dataclasses\n"
        "from expertier.planner import PolicyKind\n"
        "from expertier.planner.policy.calls import locked_calls, native\n"
        "from expertier.testing import unlocked_calls\n"
        "owners = [*native.entry_points()._owners, *(native.begin_of(kind) for kind in PolicyKind)]\n"
        "calls = [*unlocked_calls.python_calls().values(), *dataclasses.astuple(locked_calls.locked_calls())]\n"
        "misses = {sum(call.stats.cache_misses.values()) for call in calls}\n"
        "print({owner.cache_hits for owner in owners}, misses, len(calls))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )
    assert result.stdout.strip() == "{1} {0} 14"
