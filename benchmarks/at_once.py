"""Runs jobs on threads at the same time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence


def run_at_once(jobs: Sequence[Callable[[], None]]) -> float:
    """Run every job on a thread of its own; returns the seconds until all are done."""
    threads = [threading.Thread(target=job) for job in jobs]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start
