"""Several jobs at once, each on a thread of its own: they end within a limit, and an error of theirs is raised."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

LIMIT_S = 100.0


def run_at_once(jobs: Sequence[Callable[[], object]]) -> None:
    """Run each job on a thread of its own, and wait for the ends of all; raise what the first that failed raised.

    The threads are daemons named `job-0`, `job-1` and so on, in the order of `jobs`.
    """
    failures: list[BaseException] = []

    def work(job: Callable[[], object]) -> None:
        try:
            job()
        except BaseException as error:
            failures.append(error)

    threads = [
        threading.Thread(target=work, args=(job,), name=f"job-{number}", daemon=True)
        for number, job in enumerate(jobs)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive(), (
            f"{thread.name} has not ended in {LIMIT_S:.0f} s: do the jobs wait for each other?"
        )
    if failures:
        raise failures[0]
