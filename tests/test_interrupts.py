"""Regions that interrupts are kept out of: whatever instruction one comes at, it is raised once, at the end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from expertier import interrupts
from expertier.interrupts import (
    Terminated,
    deferring,
    interrupt_pending,
    interrupts_deferred,
    not_interrupted_at_entry,
    raise_pending,
    raise_terminated,
)
from interruptions.interrupt_at import at_every_instruction

FOLDERS = [str(Path(interrupts.__file__).parent) + "/"]


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """Start with the handlers that a command has."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, raise_terminated)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def assert_as_before() -> None:
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is raise_terminated
    assert not interrupt_pending()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def raised_by(work: Callable[[], None]) -> BaseException | None:
    try:
        work()
    except BaseException as error:
        return error
    return None


def test_an_interrupt_is_raised_at_the_end_of_the_region() -> None:
    pending = []

    def work() -> None:
        with interrupts_deferred():
            pending.append(interrupt_pending())
            signal.raise_signal(signal.SIGINT)
            pending.append(interrupt_pending())

    assert type(raised_by(work)) is KeyboardInterrupt
    assert pending == [False, True]
    assert_as_before()


def test_sigterm_is_raised_as_such_and_goes_first() -> None:
    def work() -> None:
        with interrupts_deferred():
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGINT)

    assert type(raised_by(work)) is Terminated
    assert_as_before()


def test_a_region_within_another_belongs_to_it() -> None:
    calls: list[str] = []

    def work() -> None:
        with interrupts_deferred(lambda: calls.append("outer")):
            with interrupts_deferred(lambda: calls.append("inner")):
                signal.raise_signal(signal.SIGINT)
            calls.append("between")
            with interrupts_deferred(lambda: calls.append("late")):  # begins with one pending
                pass

    assert type(raised_by(work)) is KeyboardInterrupt
    assert calls == ["inner", "outer", "between", "late"]
    assert_as_before()


def test_a_wait_raises_early_and_an_interrupt_that_is_caught_is_not_lost() -> None:
    caught: list[BaseException | None] = []

    def work() -> None:
        with interrupts_deferred():
            signal.raise_signal(signal.SIGINT)
            caught.append(raised_by(raise_pending))

    def wait() -> None:
        with interrupts_deferred():
            signal.raise_signal(signal.SIGINT)
            raise_pending()
            caught.append(None)

    assert type(raised_by(work)) is KeyboardInterrupt
    assert type(caught.pop()) is KeyboardInterrupt
    error = raised_by(wait)
    assert type(error) is KeyboardInterrupt
    assert error.__context__ is None
    assert not caught
    assert_as_before()


def test_a_function_that_is_not_interrupted_at_its_entry_reaches_its_try() -> None:
    begun = 0
    done: list[int] = []

    @not_interrupted_at_entry
    def work() -> None:
        nonlocal begun
        try:
            begun += 1
            len("")
        finally:
            done.append(begun)

    here = [str(Path(__file__).parent) + "/"]
    work()
    interrupted = [found.error for found in at_every_instruction(work, here)]
    assert interrupted
    assert all(isinstance(error, KeyboardInterrupt) for error in interrupted)
    assert len(done) == begun == len(interrupted) + 2


def test_a_deferring_function_ends_first() -> None:
    @deferring
    def work(amount: int) -> list[int]:
        signal.raise_signal(signal.SIGINT)
        done.append(amount)
        return done

    done: list[int] = []
    assert type(raised_by(lambda: work(3))) is KeyboardInterrupt
    assert done == [3]
    assert_as_before()


def test_handlers_of_the_programs_own_stay() -> None:
    seen: list[object] = []
    signal.signal(signal.SIGINT, lambda number, _frame: seen.append(number))

    def work() -> None:
        with interrupts_deferred():
            signal.raise_signal(signal.SIGINT)
            seen.append(interrupt_pending())
            signal.raise_signal(signal.SIGTERM)

    assert type(raised_by(work)) is Terminated
    assert seen == [signal.SIGINT, False]


def test_other_threads_have_no_regions() -> None:
    pending: list[bool] = []

    def other() -> None:
        with interrupts_deferred():
            pending.append(interrupt_pending())

    def work() -> None:
        with interrupts_deferred():
            signal.raise_signal(signal.SIGINT)
            thread = threading.Thread(target=other, daemon=True)
            thread.start()
            thread.join(10)
            pending.append(interrupt_pending())

    assert type(raised_by(work)) is KeyboardInterrupt
    assert pending == [False, True]
    assert_as_before()


def test_an_error_of_the_region_is_the_interrupts_context() -> None:
    def work() -> None:
        with interrupts_deferred():
            signal.raise_signal(signal.SIGINT)
            raise ValueError

    error = raised_by(work)
    assert type(error) is KeyboardInterrupt
    assert isinstance(error.__context__, ValueError)


def test_at_every_instruction_of_its_own_it_is_raised_and_nothing_stays_replaced() -> None:
    lock = threading.Lock()
    entered = left = 0

    def region() -> None:
        nonlocal entered, left
        with interrupts_deferred():
            entered += 1
            with interrupts_deferred(), lock:
                pass
            left += 1

    region()
    n = 0
    for found in at_every_instruction(region, FOLDERS):
        n += 1
        assert isinstance(found.error, KeyboardInterrupt), found.place
        assert entered == left, found.place
        assert not lock.locked(), found.place
        assert_as_before()
    assert n > 100
