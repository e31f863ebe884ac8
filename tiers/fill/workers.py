"""Threads that fill slots beside the thread that asked for it."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence

from expertier.interrupts import (
    POLL_INTERVAL_S,
    deferring,
    interrupt_pending,
    raise_pending,
    wait_interruptibly,
)

_log = logging.getLogger(__name__)

Task = Callable[[], None]


class _Batch:
    """Tasks that a thread waits for, with the errors of those that failed, by the task's number."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks = deque(enumerate(tasks))
        self.running = 0
        self.errors: dict[int, BaseException] = {}


class FillWorkers:
    """A few threads for reads and copies. Demand goes first: background tasks begin when no task of demand waits.

    Threads are started when work first needs them, and `close` joins them. Thread-safe. An interrupt of the main thread
    is raised after the running tasks have ended; tasks that have not begun are dropped.
    """

    def __init__(self, n_threads: int) -> None:
        """Use up to `n_threads` threads; with 0, demand runs on the calling thread and background tasks in `idle`."""
        self._n_threads = n_threads
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._threads: list[threading.Thread] = []
        self._batches: deque[_Batch] = deque()
        self._background: deque[tuple[object, Task]] = deque()
        self._background_running = 0
        self._n_busy = 0  # how many of `_threads` run a task
        self._closed = False

    @deferring
    def run(self, tasks: Sequence[Task]) -> None:
        """Run `tasks`, some of them on other threads, and return when all are done.

        The calling thread works, too, so this gets on without a free thread. After a failure, tasks that have not begun
        are dropped, and when the running ones have ended, the error of the first failed task of `tasks` is raised.
        """
        if len(tasks) <= 1 or not self._n_threads:
            for task in tasks:
                raise_pending()
                task()
            return
        batch = _Batch(tasks)
        with self._lock:
            self._batches.append(batch)
            self._start_threads(len(tasks) - 1)
            self._changed.notify_all()
        try:
            while self._run_one(batch):
                pass
            self._wait_for(batch)
        except BaseException:  # raised by a signal handler of the program's own, which no region delays
            with self._lock:
                self._drop_rest(batch)
            self._wait_for(batch)
            raise
        if batch.errors:
            raise batch.errors[min(batch.errors)]
        raise_pending()

    def later(self, label: object, task: Task) -> None:
        """Run `task` in the background, when a thread has no task of demand; do nothing after `close`.

        The task has to handle its errors itself: an error that it raises is only logged. `cancel` finds it by `label`.
        """
        self.later_all([(label, task)])

    def later_all(self, tasks: Sequence[tuple[object, Task]]) -> None:
        """Run (label, task) pairs in the background, in their order, as `later` does."""
        with self._lock:
            if self._closed:
                return
            self._background.extend(tasks)
            self._start_threads(len(self._background))
            self._changed.notify_all()

    def cancel(self, chosen: Callable[[object], bool]) -> int:
        """Drop the background tasks that have not begun and whose label `chosen` accepts; return their number."""
        with self._lock:
            before = len(self._background)
            self._background = deque(entry for entry in self._background if not chosen(entry[0]))
            return before - len(self._background)

    @property
    def n_waiting(self) -> int:
        """How many background tasks have not begun."""
        return len(self._background)

    @deferring
    def idle(self) -> None:
        """Return when no background task waits or runs; without threads, run them here. An interrupt ends it early."""
        while not self._n_threads:
            raise_pending()
            with self._lock:
                if not self._background:
                    return
                _, task = self._background.popleft()
            task()
        with self._lock:
            while self._background or self._background_running:
                wait_interruptibly(self._changed)

    @deferring
    def close(self) -> None:
        """Drop tasks that have not begun, wait for those that run, and end the threads. A second call does nothing."""
        with self._lock:
            self._closed = True
            self._background.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    # ---- inside

    def _start_threads(self, n_wanted: int) -> None:
        """Start threads until `n_wanted` are idle or the limit is reached; the caller holds the lock."""
        while not self._closed and len(self._threads) < min(self._n_threads, n_wanted + self._n_busy):
            thread = threading.Thread(target=self._work, name=f"fill-{len(self._threads)}", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system allows no more threads: the caller does the work
                return
            self._threads.append(thread)

    def _run_one(self, batch: _Batch) -> bool:
        """Run the batch's next task and return True; return False where none is left or the rest was dropped."""
        with self._lock:
            if interrupt_pending():
                self._drop_rest(batch)
            if not batch.tasks:
                return False
            number, task = self._take(batch)
        self._run(batch, number, task)
        return True

    def _take(self, batch: _Batch) -> tuple[int, Task]:
        number, task = batch.tasks.popleft()
        batch.running += 1
        if not batch.tasks and batch in self._batches:
            self._batches.remove(batch)
        return number, task

    def _run(self, batch: _Batch, number: int, task: Task) -> None:
        error: BaseException | None = None
        try:
            task()
        except BaseException as raised:
            error = raised
        with self._lock:
            if error is not None:
                batch.errors[number] = error
                self._drop_rest(batch)
            batch.running -= 1
            if not batch.running:
                self._changed.notify_all()

    def _wait_for(self, batch: _Batch) -> None:
        """Return when no task of the batch runs any more; after an interrupt no more of them begin."""
        with self._lock:
            while batch.running or batch.tasks:
                self._changed.wait(POLL_INTERVAL_S)
                if interrupt_pending():
                    self._drop_rest(batch)

    def _drop_rest(self, batch: _Batch) -> None:
        """Leave out the tasks that have not begun; the caller holds the lock."""
        batch.tasks.clear()
        if batch in self._batches:
            self._batches.remove(batch)

    def _work(self) -> None:
        while True:
            with self._lock:
                while not self._batches and not self._background and not self._closed:
                    self._changed.wait()
                batch = self._batches[0] if self._batches else None
                if batch is not None:
                    number, task = self._take(batch)
                elif self._background:
                    _, task = self._background.popleft()
                    self._background_running += 1
                else:
                    return
                self._n_busy += 1
            if batch is not None:
                self._run(batch, number, task)
            else:
                self._run_background(task)
            with self._lock:
                self._n_busy -= 1

    def _run_background(self, task: Task) -> None:
        try:
            task()
        except Exception:
            _log.exception("a background task failed with an error that it should have handled itself")
        with self._lock:
            self._background_running -= 1
            self._changed.notify_all()
