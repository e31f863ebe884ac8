"""The short ways through a layer's lock: what they take, what they leave alone, and that they never wait."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

from expertier.planner import Outcome, PolicyKind
from expertier.planner.policy.calls.locked_calls import CONDITION_OFFSET, LOCK_BYTES, locked_calls
from expertier.planner.policy.outcome import COMPLETE_AND_RELEASE
from expertier.planner.policy.residency import Residency
from expertier.testing.unlocked_calls import python_calls, unlocked
from expertier.tiers.shared import layer_locks
from expertier.tiers.shared.layer_locks import LayerLocks
from limits.waits import joined
from policy_runs.residency_arrays import ARRAYS

I32 = npt.NDArray[np.int32]
CALLS = locked_calls()


@pytest.fixture
def locks() -> Iterator[LayerLocks]:
    found = LayerLocks(2)
    yield found
    found.close()


def array(*numbers: int) -> I32:
    return np.array(numbers, np.int32)


def filled(kind: PolicyKind = PolicyKind.LFU_DECAY) -> Residency:
    """Experts 0 to 2 in layer 1's four slots; 3 is being filled."""
    residency = Residency([8, 8], [2, 4], kind)
    slots = array(-1, -1, -1)
    unlocked(residency).begin(1, array(0, 1, 2), slots, slots.copy())
    unlocked(residency).complete(1, slots)
    unlocked(residency).release(1, slots)
    unlocked(residency).begin(1, array(3), array(-1), array(-1))
    return residency


def take(residency: Residency, locks: LayerLocks, experts: I32, slots: I32, layer: int = 1) -> int:
    held = np.append(slots, np.int32(0))
    status = CALLS.try_pin_hits(residency.directory_address, locks.address, layer, experts, held)
    assert held[-1] == (status == 0), "what is pinned is marked, and nothing else"
    slots[:] = held[:-1]
    return status


def give(residency: Residency, locks: LayerLocks, slots: I32, layer: int = 1) -> int:
    held = np.append(slots, np.int32(1))
    status = CALLS.try_release_held(residency.directory_address, locks.address, layer, held)
    assert held[-1] == (status != 0), "what is not pinned any more is marked as that"
    return status


def test_locks_lie_as_the_tiers_make_them() -> None:
    assert (LOCK_BYTES, CONDITION_OFFSET) == (layer_locks.LAYER_BYTES, layer_locks.CONDITION_OFFSET)


@pytest.mark.parametrize("kind", list(PolicyKind))
def test_hits_are_taken_as_begin_takes_them(kind: PolicyKind, locks: LayerLocks) -> None:
    short, long = filled(kind), filled(kind)
    for experts in (array(2, 0), array(1), array(), array(0, 1, 2), array(1, 1)):
        slots, other = np.full(len(experts), -1, np.int32), np.full(len(experts), -1, np.int32)
        assert (
            take(short, locks, experts, slots) == unlocked(long).begin(1, experts, other, other.copy()) == 0
        )
        assert slots.tolist() == other.tolist()
        for name in ARRAYS:
            assert np.array_equal(getattr(short, name), getattr(long, name)), name
        assert give(short, locks, slots) == unlocked(long).release(1, other) == 0
    short.check_valid()


@pytest.mark.parametrize(
    ("experts", "slots", "layer", "status"),
    [
        ([0, 5], 2, 1, 1),
        ([3], 1, 1, 1),  # being filled
        ([6, 3, 5, 0], 4, 1, 3),
        ([0, 8], 2, 1, Outcome.BAD_EXPERT),
        ([-1], 1, 1, Outcome.BAD_EXPERT),
        ([0], 1, 2, Outcome.BAD_CALL),
        ([0], 1, -1, Outcome.BAD_CALL),
        ([0, 1], 1, 1, Outcome.BAD_CALL),
        ([0, 1, 2, 0, 1], 5, 1, Outcome.TOO_MANY),
    ],
)
def test_what_is_not_all_hits_is_left_alone(
    experts: list[int], slots: int, layer: int, status: int, locks: LayerLocks
) -> None:
    residency = filled()
    before = [getattr(residency, name).copy() for name in ARRAYS]
    found = np.full(slots, -1, np.int32)
    assert take(residency, locks, array(*experts), found, layer) == status
    assert found.tolist() == [-1] * slots
    for name, value in zip(ARRAYS, before, strict=True):
        assert np.array_equal(getattr(residency, name), value), name
    with locks.held(1):
        pass  # it was let go of


def test_a_lock_that_is_held_is_not_waited_for(locks: LayerLocks) -> None:
    residency = filled()
    slots = array(-1)
    assert take(residency, locks, array(0), slots) == 0
    before = [getattr(residency, name).copy() for name in ARRAYS]
    answers: list[int] = []

    def ask() -> None:
        answers.append(take(residency, locks, array(1), array(-1)))
        answers.append(give(residency, locks, slots))

    with locks.held(1):
        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        joined(thread)
        ask()  # nor by the holder itself
    assert answers == [Outcome.BUSY] * 4
    for name, value in zip(ARRAYS, before, strict=True):
        assert np.array_equal(getattr(residency, name), value), name
    assert give(residency, locks, slots) == 0


def test_giving_back_what_is_not_pinned_is_refused(locks: LayerLocks) -> None:
    residency = filled()
    assert give(residency, locks, array(0)) == Outcome.BAD_CALL
    assert give(residency, locks, array(4)) == Outcome.BAD_CALL
    assert give(residency, locks, array(), layer=2) == Outcome.BAD_CALL
    residency.check_valid()


def test_giving_back_wakes_who_waits(locks: LayerLocks) -> None:
    residency = filled()
    slots = array(-1, -1, -1)
    assert take(residency, locks, array(0, 1, 2), slots) == 0
    libc = ctypes.CDLL(None)
    mutex, condition = (ctypes.c_void_p(locks.address + LOCK_BYTES + at) for at in (0, CONDITION_OFFSET))
    waits, woken = threading.Event(), threading.Event()

    def wait() -> None:
        with locks.held(1):
            waits.set()
            while residency.pins_of(1)[0] > 0:
                libc.pthread_cond_wait(condition, mutex)  # not `locks.wait`: that one wakes by itself
        woken.set()

    threading.Thread(target=wait, daemon=True).start()
    assert waits.wait(30)
    while give(residency, locks, slots) == Outcome.BUSY:
        pass
    try:
        assert woken.wait(10)
    finally:
        with locks.held(1):
            locks.notify_all(1)  # a failing test must not hang: nobody may wait when the locks are destroyed
        assert woken.wait(30)


def test_arrays_of_another_kind_are_refused() -> None:
    residency = filled()
    if not hasattr(python_calls()["release"], "signatures"):
        pytest.skip("NUMBA_DISABLE_JIT is set: the interpreter takes any array")
    for slots in (np.zeros(4, np.int64), np.zeros(4, np.int32)[::2], np.zeros((1, 1), np.int32)):
        with pytest.raises(TypeError):
            unlocked(residency).release(1, slots)


def test_what_is_not_pinned_is_let_go_of_once() -> None:
    residency, locks = filled(), LayerLocks(2)
    held = array(-1, -1, 0)
    missing = array(-1, -1)
    assert residency.begin_held(locks.address, 1, array(0, 5), held, missing, 0, waits=False) == 1
    assert (held[-1], missing[0]) == (1, 1)
    for end_held in (
        residency.abort_held,
        residency.release_held,
        residency.try_release_held,
        residency.finish_held,
    ):
        assert end_held(locks.address, 1, held) == 0
        assert (held[-1], residency.pins_of(1)) == (0, [0, 0, 0, 1])
    assert 5 not in residency.residents(1)
    locks.close()


def test_complete_keeps_the_pins_and_finish_does_not() -> None:
    residency, locks = filled(), LayerLocks(2)
    held = array(-1, 0)
    assert residency.begin_held(locks.address, 0, array(5), held, array(-1), 0, waits=False) == 1
    assert residency.complete_held(locks.address, 0, held) == 1
    assert (held[-1], residency.pins_of(0)) == (1, [1, 0])
    assert CALLS.update_held(residency.directory_address, locks.address, COMPLETE_AND_RELEASE, 0, held) == 0
    assert (held[-1], residency.pins_of(0), residency.residents(0)) == (0, [0, 0], {5: 0})
    locks.close()


def test_a_call_that_cannot_be_had_waits_for_a_fill_and_then_says_so() -> None:
    residency, locks = filled(), LayerLocks(2)
    taken = array(-1, -1, -1, 0)
    assert residency.try_pin_hits(locks.address, 1, array(0, 1, 2), taken) == 0
    until = layer_locks.wait_deadline()
    held = array(-1, 0)

    def ask() -> int:
        return residency.begin_held(
            locks.address, 1, array(7), held, array(-1), ctypes.addressof(until), waits=False
        )

    assert ask() == Outcome.LOOK_AGAIN  # a slot is being filled
    unlocked(residency).complete(1, array(3))
    assert ask() == Outcome.BUSY  # all four are pinned
    assert held[-1] == 0
    assert residency.release_held(locks.address, 1, taken) == 0
    assert ask() == 1
    locks.close()
