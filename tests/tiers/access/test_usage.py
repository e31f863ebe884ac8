"""Who may be where: leases, an engine, background fills, and changes that need everyone out."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from expertier.errors import BusyError, LeaseError
from expertier.tiers.access.lease import Lease
from expertier.tiers.access.usage import Usage
from limits.waits import Running


def lease(thread: int | None = None) -> Lease:
    experts = np.zeros(1, np.int32)
    thread = threading.get_ident() if thread is None else thread
    return Lease(None, 0, thread, None, experts, np.zeros(2, np.int32))  # type: ignore[arg-type]


def test_a_change_waits_for_the_leases_of_others_and_keeps_new_ones_out() -> None:
    usage = Usage()
    theirs = lease(thread=1)
    usage.add(theirs)
    order: list[str] = []
    entered, leave = threading.Event(), threading.Event()

    def change() -> None:
        with usage.exclusively("move"):
            order.append("moved")
            entered.set()
            assert leave.wait(30)

    changing = Running(change)
    changing.must_wait_in("__enter__")
    ours = lease()
    adding = Running(lambda: (usage.add(ours), order.append("added")))
    filling = Running(lambda: order.append("filled") if usage.enter_background() else None)
    adding.must_wait_in("add")
    filling.must_wait_in("enter_background")
    assert order == []
    usage.forget(theirs)
    assert entered.wait(30)
    adding.must_wait_in("add")
    filling.must_wait_in("enter_background")
    assert order == ["moved"]
    leave.set()
    for each in (changing, adding, filling):
        each.outcome()
    assert sorted(order) == ["added", "filled", "moved"]
    usage.leave_background()
    assert usage.leases() == [ours]


def test_who_holds_a_lease_gets_in_while_a_change_waits() -> None:
    usage = Usage()
    ours = lease()
    usage.add(ours)
    waiting = Running(_enter, usage)
    waiting.must_wait_in("__enter__")
    second = lease()
    usage.add(second)  # the change waits for this thread, which must not wait for the change
    usage.forget(second)
    usage.forget(ours)
    waiting.outcome()


def _enter(usage: Usage) -> None:
    with usage.exclusively("move"):
        pass


def test_a_change_does_not_wait_for_its_own_threads_leases_nor_for_an_engine() -> None:
    usage = Usage()
    ours = lease()
    usage.add(ours)
    with pytest.raises(BusyError, match="cannot move while 1 leases are live"):
        _enter(usage)
    usage.forget(ours)
    usage.bind()
    with pytest.raises(BusyError, match="an engine is bound"):
        _enter(usage)
    usage.unbind(lambda: 0)
    _enter(usage)


def test_a_change_waits_only_so_long() -> None:
    usage = Usage()
    usage.add(lease(thread=1))
    with pytest.raises(BusyError, match="are live"), usage.exclusively("move", wait_s=0.01):
        pass
    assert usage._n_exclusive == 0
    usage.add(lease())


def test_changes_wait_for_each_other() -> None:
    usage = Usage()
    inside: list[int] = []
    most: list[int] = []

    def change() -> None:
        for _ in range(20):
            with usage.exclusively("move"):
                inside.append(1)
                most.append(len(inside))
                time.sleep(0)  # a pause: lets others in, if it may
                inside.pop()

    for each in [Running(change) for _ in range(4)]:
        each.outcome()
    assert max(most) == 1


def test_background_fills_end_before_a_change_and_before_a_close() -> None:
    usage = Usage()
    assert usage.enter_background()
    changing = Running(_enter, usage)
    changing.must_wait_in("__enter__")
    usage.leave_background()
    changing.outcome()
    assert usage.enter_background()
    closing = Running(usage.close)
    closing.must_wait_in("close")
    usage.leave_background()
    assert closing.outcome()
    assert not usage.enter_background()


def test_nobody_gets_in_after_a_close() -> None:
    usage = Usage()
    assert usage.close()
    assert not usage.close()
    for call in (lambda: usage.add(lease()), usage.bind, lambda: _enter(usage)):
        with pytest.raises(LeaseError, match="closed"):
            call()


def test_an_engine_waits_for_a_change_and_nobody_closes_during_one() -> None:
    usage = Usage()
    entered, leave = threading.Event(), threading.Event()

    def change() -> None:
        with usage.exclusively("move"):
            entered.set()
            assert leave.wait(30)

    changing = Running(change)
    assert entered.wait(30)
    with pytest.raises(BusyError, match="cannot close while the slots are being moved"):
        usage.close()
    binding = Running(usage.bind)
    binding.must_wait_in("bind")
    assert not usage.bound
    leave.set()
    changing.outcome()
    binding.outcome()
    assert usage.bound
