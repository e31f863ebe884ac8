"""What an engine's plugin asks of the policy beside look-ups: pins that are no uses, whole layers, versions."""

from __future__ import annotations

import ctypes

import numba
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertier.planner import PolicyKind
from expertier.planner.policy.calls.native import entry_points
from expertier.planner.policy.residency import Residency
from expertier.testing.unlocked_calls import unlocked

pytestmark = pytest.mark.skipif(bool(numba.config.DISABLE_JIT), reason="NUMBA_DISABLE_JIT is set")

_INTS = ctypes.POINTER(ctypes.c_int32)
_Hold = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32, _INTS, ctypes.c_int32, _INTS)
_OnLayer = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32)

WHOLE, PART = 0, 1  # layers: a slot for each of 6 experts, and 3 slots for 6


class Calls:
    """A residency of two layers and its C functions."""

    def __init__(self) -> None:
        self.residency = Residency([6, 6], [6, 3], PolicyKind.LFU_DECAY)
        points = entry_points()
        self._hold, self._whole, self._version = (
            _Hold(points.pin_ready),
            _OnLayer(points.is_fully_resident),
            _OnLayer(points.version),
        )

    def begin(self, layer: int, *experts: int) -> list[int]:
        slots = np.zeros(len(experts), np.int32)
        misses = np.zeros(len(experts), np.int32)
        assert unlocked(self.residency).begin(layer, np.array(experts, np.int32), slots, misses) >= 0
        return slots.tolist()

    def bring(self, layer: int, *experts: int) -> list[int]:
        slots = self.begin(layer, *experts)
        unlocked(self.residency).complete(layer, np.array(slots, np.int32))
        self.release(layer, slots)
        return slots

    def release(self, layer: int, slots: list[int]) -> None:
        assert unlocked(self.residency).release(layer, np.array(slots, np.int32)) == 0

    def hold(self, layer: int, *experts: int) -> tuple[int, list[int]]:
        wanted = np.array(experts, np.int32)
        slots = np.full(len(experts), -7, np.int32)
        status = self._hold(
            self.residency.directory_address,
            layer,
            wanted.ctypes.data_as(_INTS),
            len(experts),
            slots.ctypes.data_as(_INTS),
        )
        return status, slots.tolist()

    def is_fully_resident(self, layer: int) -> int:
        return int(self._whole(self.residency.directory_address, layer))

    def version(self, layer: int) -> int:
        return int(self._version(self.residency.directory_address, layer))


@pytest.fixture
def calls() -> Calls:
    return Calls()


def test_holding_pins_what_is_ready_and_is_no_use(calls: Calls) -> None:
    calls.bring(PART, 4, 2)
    filling = calls.begin(PART, 5)  # in no layer's order: still being read
    heat = calls.residency.by_layer("hits"), calls.residency.totals()
    held, slots = calls.hold(PART, 2, 5, 0, 4)
    assert (held, slots[1], slots[2]) == (2, -1, -1)
    assert min(slots[0], slots[3]) >= 0
    assert (calls.residency.by_layer("hits"), calls.residency.totals()) == heat
    assert sorted(calls.residency.pins_of(PART)) == [1, 1, 1]
    calls.release(PART, [slots[0], slots[3], *filling])
    assert calls.residency.pins_of(PART) == [0, 0, 0]


def test_what_is_held_is_no_victim(calls: Calls) -> None:
    calls.bring(PART, 0, 1, 2)
    _, (slot,) = calls.hold(PART, 0)
    for expert in (3, 4, 5, 3, 4, 5):
        assert calls.bring(PART, expert) != [slot]
    calls.release(PART, [slot])


@pytest.mark.parametrize("expert", [-1, 6])
def test_an_expert_that_is_not_there_holds_nothing(calls: Calls, expert: int) -> None:
    calls.bring(PART, 0)
    assert calls.hold(PART, 0, expert)[0] < 0
    assert calls.residency.pins_of(PART) == [0, 0, 0]


def test_with_a_slot_for_every_expert_each_gets_the_slot_of_its_number(calls: Calls) -> None:
    for expert in (5, 2, 0, 4, 1):
        assert calls.bring(WHOLE, expert) == [expert]
        assert calls.is_fully_resident(WHOLE) == 0
    calls.begin(WHOLE, 3)
    assert calls.is_fully_resident(WHOLE) == 0, "its last expert is still being read"
    unlocked(calls.residency).complete(WHOLE, np.array([3], np.int32))
    assert calls.is_fully_resident(WHOLE) == 1


def test_a_layer_with_fewer_slots_is_never_whole(calls: Calls) -> None:
    calls.bring(PART, 0, 1, 2)
    assert calls.is_fully_resident(PART) == 0


def test_another_directory_is_refused(calls: Calls) -> None:
    assert calls.is_fully_resident(2) < 0
    assert calls.version(2) < 0


@given(st.lists(st.tuples(st.sampled_from(["bring", "hit", "abort"]), st.integers(0, 5)), max_size=25))
def test_the_version_changes_exactly_when_the_experts_in_slots_do(actions: list[tuple[str, int]]) -> None:
    calls = Calls()
    for action, expert in actions:
        before = calls.residency.residents(PART), calls.version(PART)
        if action == "abort" and expert not in before[0]:
            unlocked(calls.residency).abort(PART, np.array(calls.begin(PART, expert), np.int32))
        elif action == "bring" or expert in before[0]:
            calls.bring(PART, expert)
        after = calls.residency.residents(PART), calls.version(PART)
        if before[0] != after[0]:
            assert before[1] != after[1]
        if action == "hit" or (action == "bring" and expert in before[0]):
            assert before == after
