"""The fill threads: everything runs once, the first error counts, demand goes first, and nothing outlives a close."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest

from expertier.tiers.fill.workers import FillWorkers
from limits.waits import Running, joined, wait_until


@pytest.fixture(params=[0, 1, 3])
def workers(request: pytest.FixtureRequest) -> Iterator[FillWorkers]:
    before = set(threading.enumerate())  # other tests may have left tiers open
    workers = FillWorkers(request.param)
    yield workers
    workers.close()
    assert not [t for t in set(threading.enumerate()) - before if t.name.startswith("fill-")]


def test_every_task_runs_once_and_all_are_done_at_the_end(workers: FillWorkers) -> None:
    for n in (0, 1, 2, 5, 40):
        done: list[int] = []
        workers.run([partial(done.append, i) for i in range(n)])
        assert sorted(done) == list(range(n))


def test_several_threads_may_ask_at_once(workers: FillWorkers) -> None:
    counts: list[int] = []

    def ask() -> None:
        for _ in range(20):
            done: list[int] = []
            workers.run([partial(done.append, i) for i in range(7)])
            counts.append(len(done))

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    joined(*threads)
    assert counts == [7] * 80


def test_the_first_error_by_order_is_raised_once_nothing_runs_any_more(workers: FillWorkers) -> None:
    running: list[int] = []

    def task(number: int) -> None:
        running.append(number)
        time.sleep(0)  # a pause: lets the others begin
        try:
            if number in (2, 4):
                raise ValueError(str(number))
        finally:
            running.remove(number)

    for _ in range(5):
        with pytest.raises(ValueError, match=r"[24]"):
            workers.run([partial(task, i) for i in range(8)])
        assert running == []
    done: list[int] = []
    workers.run([partial(done.append, i) for i in range(4)])
    assert sorted(done) == [0, 1, 2, 3]


def test_after_an_error_what_has_not_begun_is_left_out() -> None:
    workers = FillWorkers(2)
    begun: list[int] = []

    def task(number: int) -> None:
        begun.append(number)
        if number == 0:
            raise KeyboardInterrupt
        wait_until(lambda: not any(batch.tasks for batch in workers._batches), "the rest was not left out")

    with pytest.raises(KeyboardInterrupt):
        workers.run([partial(task, i) for i in range(200)])
    assert len(begun) <= 3, "those that had begun on other threads"
    workers.close()


def test_demand_goes_before_background_work() -> None:
    workers = FillWorkers(1)
    order: list[str] = []
    may_go_on, started = threading.Event(), threading.Event()

    def hold() -> None:
        started.set()
        assert may_go_on.wait(30)

    workers.later("hold", hold)
    assert started.wait(30)
    workers.later("background", lambda: order.append("background"))
    demand = threading.Thread(target=workers.run, args=([partial(order.append, "demand")] * 6,), daemon=True)
    demand.start()
    joined(demand)  # the asking thread does it all itself: the only worker is busy
    may_go_on.set()
    workers.idle()
    assert order == ["demand"] * 6 + ["background"]
    workers.close()


def test_background_work_can_be_cancelled_before_it_begins(workers: FillWorkers) -> None:
    may_go_on = threading.Event()
    done: list[object] = []
    for _ in range(3):
        workers.later("hold", lambda: may_go_on.wait(30) and None)
    if workers._n_threads:
        wait_until(lambda: workers.n_waiting == 3 - workers._n_threads or workers.n_waiting == 0)
    for label in ("a", "b", "a"):
        workers.later(label, partial(done.append, label))
    assert workers.cancel(lambda label: label == "a") == 2
    may_go_on.set()
    workers.idle()
    assert done == ["b"]


def test_close_forgets_what_waits_and_ends_what_runs() -> None:
    workers = FillWorkers(1)
    done: list[str] = []
    started, go = threading.Event(), threading.Event()

    def slow() -> None:
        started.set()
        assert go.wait(30)
        done.append("slow")

    workers.later("slow", slow)
    assert started.wait(30)
    workers.later("never", lambda: done.append("never"))
    closing = Running(workers.close)
    wait_until(lambda: not workers.n_waiting)
    assert done == []
    go.set()
    closing.outcome()
    workers.close()
    workers.later("after", lambda: done.append("after"))
    assert done == ["slow"]


def test_an_error_of_background_work_ends_no_thread() -> None:
    workers = FillWorkers(1)
    done: list[int] = []

    def fails() -> None:
        raise ValueError("background")

    workers.later("fails", fails)
    workers.later("works", lambda: done.append(1))
    workers.idle()
    assert done == [1]
    workers.close()


def test_without_another_thread_the_asking_one_does_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    workers = FillWorkers(4)
    done: list[int] = []
    workers.run([partial(done.append, i) for i in range(9)])
    assert sorted(done) == list(range(9))
    workers.close()


def test_idle_waits_for_what_runs_though_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = FillWorkers(1)
    started, go, waits = threading.Event(), threading.Event(), threading.Event()
    wait, done = workers._changed.wait, list[int]()

    def task() -> None:
        started.set()
        go.wait(30)
        done.append(1)

    def noted_wait(timeout: float | None = None) -> bool:
        if threading.current_thread() is waiter:
            waits.set()
        return wait(timeout)

    def drain() -> None:
        workers.idle()
        done.append(2)

    monkeypatch.setattr(workers._changed, "wait", noted_wait)
    waiter = threading.Thread(target=drain, daemon=True)
    workers.later("it", task)
    assert started.wait(30)
    waiter.start()
    wait_until(lambda: waits.is_set() or not waiter.is_alive())
    assert waits.is_set(), "it returned while the task ran"
    go.set()
    joined(waiter)
    workers.close()
    assert done == [1, 2]


def test_an_interrupt_of_whoever_asked_waits_for_what_runs_and_forgets_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It comes while the asking thread waits for the other one's task."""
    workers = FillWorkers(1)
    asking = threading.current_thread()
    theirs, done = threading.Event(), list[str]()
    wait = workers._changed.wait

    def slow() -> None:
        if threading.current_thread() is asking:
            theirs.wait(30)  # so that the other thread has a task, too
            done.append("ours")
        else:
            theirs.set()
            wait_until(lambda: "interrupt" in done)
            done.append("theirs")

    def interrupted_once(timeout: float | None = None) -> bool:
        if threading.current_thread() is asking and "interrupt" not in done:
            done.append("interrupt")
            raise KeyboardInterrupt
        return wait(timeout)

    monkeypatch.setattr(workers._changed, "wait", interrupted_once)
    with pytest.raises(KeyboardInterrupt):
        workers.run([slow, slow])
    assert done == ["ours", "interrupt", "theirs"], "a task ran on after the call had ended"
    workers.run([partial(done.append, "next"), partial(done.append, "next")])
    assert done[3:] == ["next", "next"]
    workers.close()


def test_an_interrupt_between_two_tasks_forgets_those_that_have_not_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workers = FillWorkers(1)
    done: list[int] = []

    def interrupted(*_: object) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(workers, "_start_threads", lambda _: None)
    monkeypatch.setattr(workers, "_run_one", interrupted)
    first = workers._changed.wait

    def interrupted_wait() -> bool:
        monkeypatch.setattr(workers._changed, "wait", first)
        raise KeyboardInterrupt

    monkeypatch.setattr(workers._changed, "wait", interrupted_wait)
    with pytest.raises(KeyboardInterrupt):
        workers.run([partial(done.append, 1), partial(done.append, 2)])
    monkeypatch.undo()
    assert (done, list(workers._batches)) == ([], [])
    workers.run([partial(done.append, 3), partial(done.append, 3)])
    assert done == [3, 3]
    workers.close()
