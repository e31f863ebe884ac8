"""Layer locks: exclusion, waiting, and that signals and mistakes leave them usable."""

from __future__ import annotations

import _thread
import threading
import time

import pytest

from expertier.tiers.shared.layer_locks import LAYER_BYTES, LayerLocks
from limits.waits import joined


def test_a_lock_excludes_and_layers_are_independent() -> None:
    locks = LayerLocks(2)
    total = 0

    def add() -> None:
        nonlocal total
        for _ in range(2000):
            with locks.held(0):
                before = total
                if before % 100 == 0:
                    time.sleep(0)  # a pause: lets others in, if it may
                total = before + 1

    with locks.held(1):
        threads = [threading.Thread(target=add, daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        joined(*threads)
    assert total == 8000
    locks.close()
    locks.close()


def test_the_lock_is_given_back_after_an_error() -> None:
    locks = LayerLocks(1)
    with pytest.raises(KeyError), locks.held(0):
        raise KeyError
    with locks.held(0):
        pass


def test_taking_a_lock_twice_is_a_bug_and_not_a_hang() -> None:
    locks = LayerLocks(1)
    with locks.held(0), pytest.raises(AssertionError, match="deadlock"), locks.held(0):
        pass
    with locks.held(0):
        pass


def test_wait_lets_others_in_and_notify_wakes() -> None:
    locks = LayerLocks(1)
    states: list[str] = []

    def other() -> None:
        with locks.held(0):
            states.append("changed")
            locks.notify_all(0)

    with locks.held(0):
        thread = threading.Thread(target=other, daemon=True)
        thread.start()
        while not states:
            locks.wait(0)
        states.append("seen")
    joined(thread)
    assert states == ["changed", "seen"]


def test_a_wait_ends_by_itself_so_that_signals_are_seen() -> None:
    locks = LayerLocks(1)
    with locks.held(0):
        locks.wait(0)


def take_forever(locks: LayerLocks) -> None:
    while True:
        with locks.held(0):
            pass


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_while_waiting_for_a_lock_leaves_it_free() -> None:
    locks = LayerLocks(1)
    taken, done = threading.Event(), threading.Event()

    def holder() -> None:
        with locks.held(0):
            taken.set()
            done.wait(10)
            _thread.interrupt_main()

    thread = threading.Thread(target=holder, daemon=True)
    thread.start()
    taken.wait(10)
    done.set()
    with pytest.raises(KeyboardInterrupt):
        take_forever(locks)
    joined(thread)
    for _ in range(3):
        with locks.held(0):
            pass


def test_addresses_are_those_that_the_engine_computes() -> None:
    locks = LayerLocks(3)
    assert locks.address % LAYER_BYTES == 0
    assert [mutex.value for mutex in locks._mutexes] == [locks.address + i * 128 for i in range(3)]
    assert [condition.value for condition in locks._conditions] == [
        locks.address + i * 128 + 64 for i in range(3)
    ]
