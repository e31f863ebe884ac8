"""Claims: what was really taken against the plan, undone as a whole; several plans on one device."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertier.errors import BudgetError
from expertier.planner import LayerDemand
from expertier.planner.budget.ledger import Consumer, DeviceLedger, DeviceNeeds, plan_device
from expertier.planner.budget.ledger_claim import Claim, DeviceBooks
from expertier.units import MIB

DEMANDS = [LayerDemand(layer=0, n_experts=64, top_k=2, slot_bytes=MIB, fixed_bytes=0)]
NEEDS = DeviceNeeds(free=40 * MIB, weights=10 * MIB, kv=8 * MIB, headroom=4 * MIB, reserve=2 * MIB)


class Memory:
    """A device whose allocations are numbers, and whose N-th one or N-th free fails."""

    def __init__(self, free: int, fail_at: int = -1) -> None:
        self.free = free
        self.left = fail_at
        self.live: list[int] = []

    def alloc(self, n_bytes: int) -> None:
        if self.left == 0 or n_bytes > self.free:
            raise MemoryError("no memory")
        self.left -= 1
        self.free -= n_bytes
        self.live.append(n_bytes)

    def freeing(self, n_bytes: int):
        def undo() -> None:
            self.live.remove(n_bytes)
            self.free += n_bytes

        return undo


def ledger() -> DeviceLedger:
    return plan_device(NEEDS, DEMANDS)


def test_taken_as_planned() -> None:
    with Claim(ledger()) as claim:
        assert claim.outstanding_bytes == 34 * MIB  # not the headroom, not the reserve
        claim.take(Consumer.WEIGHTS, 10 * MIB)
        claim.take(Consumer.KV, 8 * MIB)
        claim.take(Consumer.ARENA, 16 * MIB)
        assert claim.outstanding_bytes == 0
        taken = claim.commit()
    assert taken == {Consumer.WEIGHTS: 10 * MIB, Consumer.KV: 8 * MIB, Consumer.ARENA: 16 * MIB}
    again = plan_device(DeviceNeeds(free=6 * MIB + 16 * MIB, headroom=4 * MIB, reserve=2 * MIB, taken={
        consumer: n_bytes for consumer, n_bytes in taken.items() if consumer is not Consumer.ARENA
    }), DEMANDS)  # fmt: skip
    assert again.arena_bytes == 16 * MIB, "planned again with what is there, the arena is the same"


def test_less_here_pays_for_more_there() -> None:
    claim = Claim(ledger())
    claim.take(Consumer.WEIGHTS, 7 * MIB)
    claim.take(Consumer.KV, 11 * MIB)
    claim.take(Consumer.ARENA, 16 * MIB)
    assert [(row.consumer, row.beyond_bytes) for row in claim.compare() if row.beyond_bytes] == [
        (Consumer.WEIGHTS, -3 * MIB),
        (Consumer.KV, 3 * MIB),
    ]
    claim.commit()
    assert not claim.is_open


def test_more_than_there_is_gives_everything_back() -> None:
    memory = Memory(40 * MIB)
    claim = Claim(ledger())
    for consumer, n_bytes in (
        (Consumer.WEIGHTS, 10 * MIB),
        (Consumer.KV, 9 * MIB),
        (Consumer.ARENA, 16 * MIB),
    ):
        memory.alloc(n_bytes)
        claim.take(consumer, n_bytes, memory.freeing(n_bytes))
    with pytest.raises(BudgetError, match=r"1\.0 MiB more .* kv took 9\.0 MiB of 8\.0 MiB planned") as caught:
        claim.commit()
    assert "larger by 1" in str(caught.value)
    assert memory.live == []
    assert memory.free == 40 * MIB
    assert not claim.is_open


@given(st.integers(0, 5), st.integers(-1, 4))
def test_a_failure_at_any_call_leaves_nothing(fail_at: int, raise_in_undo: int) -> None:
    """The N-th allocation fails, or the N-th undo raises: all the others are undone all the same."""
    memory = Memory(40 * MIB, fail_at)
    undone: list[int] = []

    def run() -> None:
        with Claim(ledger()) as claim:
            for number, consumer in enumerate(
                (Consumer.WEIGHTS, Consumer.KV, Consumer.COMPUTE_WIDE, Consumer.ARENA)
            ):
                memory.alloc(MIB + number)
                free = memory.freeing(MIB + number)

                def undo(free=free, number=number) -> None:
                    undone.append(number)
                    free()
                    if number == raise_in_undo:
                        raise RuntimeError("undo failed")

                claim.take(consumer, MIB + number, undo)
            raise KeyError("something else went wrong")

    with pytest.raises((MemoryError, KeyError, RuntimeError)):
        run()
    assert memory.live == []
    assert undone == sorted(undone, reverse=True)


def test_several_takes_add_up_and_closed_claims_refuse() -> None:
    claim = Claim(ledger())
    claim.take(Consumer.WEIGHTS, 4 * MIB)
    claim.take(Consumer.WEIGHTS, 6 * MIB)
    assert claim.outstanding_bytes == 24 * MIB
    for consumer, n_bytes in ((Consumer.RESERVE, 1), (Consumer.HEADROOM, 1), (Consumer.KV, -1)):
        with pytest.raises(ValueError, match="cannot take"):
            claim.take(consumer, n_bytes)
    claim.rollback()
    claim.rollback()
    assert claim.outstanding_bytes == 0
    with pytest.raises(ValueError, match="closed"):
        claim.take(Consumer.KV, 1)


def test_two_models_plan_on_one_device() -> None:
    memory = Memory(60 * MIB)
    books = DeviceBooks(lambda: memory.free)
    needs = DeviceNeeds(free=0, weights=10 * MIB, headroom=4 * MIB)
    first = books.open(needs, DEMANDS, cap_bytes=20 * MIB)
    second = books.open(needs, DEMANDS)
    assert first.ledger.arena_bytes == 20 * MIB
    assert second.ledger.arena_bytes == (60 - 30 - 14) * MIB, "what the first was promised is not there"
    memory.alloc(30 * MIB)
    first.take(Consumer.WEIGHTS, 10 * MIB)
    first.take(Consumer.ARENA, 20 * MIB)
    second.rollback()
    third = books.open(needs, DEMANDS)
    assert third.ledger.arena_bytes == 16 * MIB, "taken bytes are gone from the free ones, and count once"
    first.commit()
    books.check_valid()
    third.rollback()
    with pytest.raises(BudgetError):
        books.open(DeviceNeeds(free=0, weights=30 * MIB), DEMANDS)
    assert books.open(needs, DEMANDS).ledger.arena_bytes == 16 * MIB
