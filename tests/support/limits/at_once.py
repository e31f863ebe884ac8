"""Several jobs at once, each on a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence


def run_at_once(jobs: Sequence[Callable[[], object]]) -> None:
    """Run each job on a thread of its own; raise what one of them raised."""
    failures: list[BaseException] = []

    def work(job: Callable[[], object]) -> None:
        try:
            job()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(job,), daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
        assert not thread.is_alive(), "they wait for each other"
    if failures:
        raise failures[0]
