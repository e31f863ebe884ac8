"""A time limit for each test, and for the process's end: hooks that `tests/conftest.py` takes over.

pytest-timeout (`timeout` in pyproject.toml) interrupts the main thread, so that a test that waits in Python fails, says
where all threads are, and the others go on. A signal does nothing to a thread that waits in C, nor does a thread of
Python's where C keeps the interpreter: a watchdog of faulthandler's, a thread in C, ends the process then, after it has
written where everyone is. pytest-xdist says which test it was and starts another process for the rest.
"""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Generator, Sequence

import pytest

DEEP_S = 10_800.0  # a property or a machine with the deep profile, or llama.cpp built from source
GRACE_S = 60.0  # until a test that its limit has not ended is ended with its process
END_S = 120.0  # for what runs after the last test: threads and processes that nobody ended

_stderr = 2


def pytest_configure() -> None:
    """Keep the real standard error: what a process says while it is ended is not captured."""
    global _stderr  # one a process, as the watchdog is
    _stderr = os.dup(2)


def pytest_collection_modifyitems(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    """Give deep tests, and all tests with the deep profile, their time."""
    all_are_deep = config.getoption("--hypothesis-profile", default=None) == "deep"
    for item in items:
        is_deep = all_are_deep or item.get_closest_marker("deep") is not None
        if is_deep and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(DEEP_S))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """End the process when the test's limit did not end the test."""
    faulthandler.dump_traceback_later(limit_s(item) + GRACE_S, exit=True, file=_stderr)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def pytest_unconfigure() -> None:
    """Have the process end, whatever a test has left behind."""
    faulthandler.dump_traceback_later(END_S, exit=True, file=_stderr)


def limit_s(item: pytest.Item) -> float:
    """The time limit of a test."""
    marker = item.get_closest_marker("timeout")
    return float(marker.args[0] if marker is not None else item.config.getini("timeout"))
