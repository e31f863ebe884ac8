"""Prefetches into a slot of the caller's choice, and the list of slots that can be had."""

from __future__ import annotations

import ctypes

import numba
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertier.planner import Outcome, PolicyKind
from expertier.planner.policy.calls.native import entry_points
from expertier.planner.policy.residency import Residency
from expertier.testing.unlocked_calls import unlocked

pytestmark = pytest.mark.skipif(bool(numba.config.DISABLE_JIT), reason="NUMBA_DISABLE_JIT is set")

EXPERTS, SLOTS = 8, 4

_INTS = ctypes.POINTER(ctypes.c_int32)
_Victims = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32, _INTS, ctypes.c_int32, _INTS)
_Into = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32)


def make(kind: PolicyKind = PolicyKind.LFU_DECAY) -> Residency:
    return Residency([EXPERTS, EXPERTS], [SLOTS, 2], kind)


def victims(residency: Residency, n: int = 8, layer: int = 0) -> list[tuple[int, int]]:
    """Slots and experts."""
    slots, experts = np.full(max(n, 1), -7, np.int32), np.full(max(n, 1), -7, np.int32)
    call = _Victims(entry_points().victims)
    found = call(
        residency.directory_address, layer, slots.ctypes.data_as(_INTS), n, experts.ctypes.data_as(_INTS)
    )
    if found < 0:
        raise ValueError(found)
    assert (slots[found:] == -7).all()
    return list(zip(slots[:found].tolist(), experts[:found].tolist(), strict=True))


def into(residency: Residency, expert: int, slot: int, layer: int = 0) -> int:
    return int(_Into(entry_points().begin_prefetch_into)(residency.directory_address, layer, expert, slot))


def begin(residency: Residency, *experts: int) -> list[int]:
    slots = np.zeros(len(experts), np.int32)
    assert unlocked(residency).begin(0, np.array(experts, np.int32), slots, slots.copy()) >= 0
    unlocked(residency).complete(0, slots)
    return slots.tolist()


def release(residency: Residency, slots: list[int]) -> None:
    assert unlocked(residency).release(0, np.array(slots, np.int32)) == 0


def use(residency: Residency, *experts: int) -> None:
    release(residency, begin(residency, *experts))


@pytest.mark.parametrize("kind", list(PolicyKind))
@given(st.lists(st.integers(0, EXPERTS - 1), max_size=20), st.sets(st.integers(0, EXPERTS - 1), max_size=2))
def test_the_list_is_the_order_in_which_experts_leave(
    kind: PolicyKind, used: list[int], held: set[int]
) -> None:
    residency = make(kind)
    for expert in used:
        use(residency, expert)
    pinned = [slot for expert in held for slot in begin(residency, expert)]
    listed = victims(residency)
    residents = dict(enumerate(residency.owner[:SLOTS].tolist()))
    assert dict(listed) == {slot: expert for slot, expert in residents.items() if slot not in pinned}
    assert victims(residency, 2) == listed[:2]
    new = [expert for expert in range(EXPERTS) if expert not in residents.values()]
    for (slot, _), expert in zip(listed, new, strict=False):
        taken = unlocked(residency).begin_prefetch(0, expert)  # no use, so the order of the others stays
        assert taken == slot


def test_a_prefetch_takes_the_slot_that_was_named() -> None:
    residency = make()
    use(residency, 0, 1, 2, 3)
    slot, leaves = victims(residency)[-1]
    assert into(residency, 7, slot) == slot
    residency.check_valid()
    assert residency.owner[slot] == 7
    assert leaves not in residency.residents(0)
    assert slot not in dict(victims(residency)), "it is being filled"
    assert (
        unlocked(residency).begin(0, np.array([7], np.int32), np.zeros(1, np.int32), np.zeros(1, np.int32))
        == Outcome.BUSY
    )
    unlocked(residency).complete(0, np.array([slot], np.int32))
    release(residency, [slot])
    residency.check_valid()
    assert victims(residency)[0] == (slot, 7), "what nobody asked for leaves first"
    assert residency.totals()["prefetches"] == 1
    use(residency, 7)
    assert residency.totals()["prefetches_useful"] == 1


def test_what_cannot_be_prefetched_changes_nothing() -> None:
    residency = make()
    held = begin(residency, 0)
    use(residency, 1)
    before = {
        name: getattr(residency, name).copy() for name in ("owner", "order", "pins", "counters", "state")
    }
    free = next(slot for slot, expert in victims(residency) if expert < 0)
    assert into(residency, 5, held[0]) == Outcome.BUSY
    assert into(residency, 1, free) == Outcome.PRESENT
    assert into(residency, EXPERTS, free) == into(residency, -1, free) == Outcome.BAD_EXPERT
    assert (
        into(residency, 5, SLOTS)
        == into(residency, 5, -1)
        == into(residency, 5, 0, layer=2)
        == Outcome.BAD_CALL
    )
    with pytest.raises(ValueError, match="-4"):
        victims(residency, -1)
    with pytest.raises(ValueError, match="-4"):
        victims(residency, 1, layer=9)
    assert victims(residency, 0) == []
    for name, value in before.items():
        assert np.array_equal(getattr(residency, name), value), name
    release(residency, held)


def test_one_that_fails_leaves_a_free_slot() -> None:
    residency = make()
    use(residency, 0, 1, 2, 3)
    slot, _ = victims(residency)[0]
    assert into(residency, 6, slot) == slot
    unlocked(residency).abort(0, np.array([slot], np.int32))
    residency.check_valid()
    assert victims(residency)[0] == (slot, -1)
    assert residency.totals()["prefetches"] == 0
