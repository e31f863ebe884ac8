"""Who may be where: leases, an engine, background fills, and changes that need everyone out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from expertier.errors import BusyError, LeaseError
from expertier.tiers.lease import Lease
from expertier.tiers.usage import Usage


def lease(thread: int | None = None) -> Lease:
    experts = np.zeros(1, np.int32)
    thread = threading.get_ident() if thread is None else thread
    return Lease(None, 0, thread, None, experts, np.zeros(2, np.int32))  # type: ignore[arg-type]


def in_thread(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=call)
    thread.start()
    return thread


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

    changing = in_thread(change)
    while not usage._n_exclusive:
        time.sleep(0.001)
    ours = lease()
    adding = in_thread(lambda: (usage.add(ours), order.append("added")))
    filling = in_thread(lambda: order.append("filled") if usage.enter_background() else None)
    time.sleep(0.02)
    assert order == []
    usage.forget(theirs)
    assert entered.wait(30)
    assert order == ["moved"]
    leave.set()
    for thread in (changing, adding, filling):
        thread.join()
    assert sorted(order) == ["added", "filled", "moved"]
    usage.leave_background()
    assert usage.leases() == [ours]


def test_who_holds_a_lease_gets_in_while_a_change_waits() -> None:
    usage = Usage()
    ours = lease()
    usage.add(ours)
    waiting = in_thread(lambda: _enter(usage))
    while not usage._n_exclusive:
        time.sleep(0.001)
    second = lease()
    usage.add(second)  # the change waits for this thread, which must not wait for the change
    usage.forget(second)
    usage.forget(ours)
    waiting.join()


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
                time.sleep(0.0001)
                inside.pop()

    threads = [in_thread(change) for _ in range(4)]
    for thread in threads:
        thread.join()
    assert max(most) == 1


def test_background_fills_end_before_a_change_and_before_a_close() -> None:
    usage = Usage()
    assert usage.enter_background()
    changing = in_thread(lambda: _enter(usage))
    time.sleep(0.01)
    assert changing.is_alive()
    usage.leave_background()
    changing.join()
    assert usage.enter_background()
    closing = in_thread(usage.close)
    time.sleep(0.01)
    assert closing.is_alive()
    usage.leave_background()
    closing.join()
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

    changing = in_thread(change)
    assert entered.wait(30)
    with pytest.raises(BusyError, match="cannot close while the slots are being moved"):
        usage.close()
    binding = in_thread(usage.bind)
    time.sleep(0.01)
    assert not usage.bound
    leave.set()
    changing.join()
    binding.join()
    assert usage.bound
