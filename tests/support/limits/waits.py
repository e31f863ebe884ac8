"""Waits that have a limit: for a state, for threads, for processes; and threads that are seen to wait.

`tests/test_waits.py` forbids the other kind. That nothing happens is not shown by a pause, in which a loaded machine
gets nowhere: have the thread that must wait seen in its wait (`Running.must_wait_in`).
"""

from __future__ import annotations

import faulthandler
import re
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

PATIENCE_S = 150.0
"""How long to wait for what must happen: longer than a loaded machine takes, shorter than a test's limit."""

_LOOK_S = 0.001
_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)")
_FRAME = re.compile(r'  File ".*", line \S+ in (\S+)')
_BLOCKING = (
    "wait",
    "wait_for",
    "begin_held",
    "wait_until",
)  # of conditions and events, and of a layer's slots

T = TypeVar("T")


def wait_until(happened: Callable[[], object], what: str = "it did not happen") -> None:
    """Look at a state until it is so."""
    end = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < end, f"{what} in {PATIENCE_S:.0f} s"
        time.sleep(_LOOK_S)  # a pause: between two looks


def joined(*threads: threading.Thread) -> None:
    """Wait for the threads' ends."""
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), f"thread {thread.name} has not ended in {PATIENCE_S:.0f} s"


class Running(Generic[T]):
    """A call on a thread of its own, which begins at once."""

    def __init__(self, call: Callable[..., T], /, *arguments: Any, **named: Any) -> None:
        self._results: list[T] = []
        self._error: BaseException | None = None

        def run() -> None:
            try:
                self._results.append(call(*arguments, **named))
            except BaseException as error:
                self._error = error

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()

    def outcome(self) -> T:
        """Wait for its end; return what it returned, or raise what it raised."""
        joined(self.thread)
        if self._error is not None:
            raise self._error
        return self._results[0]

    def must_wait_in(self, function: str) -> None:
        """Return once it waits for others, inside of a function of that name; fail if it ends instead."""

        def waits() -> bool:
            assert self.thread.is_alive(), f"it ended, instead of waiting in {function}: {self._error!r}"
            return is_waiting(self.thread, function)

        wait_until(waits, f"it did not wait in {function}")


def is_waiting(thread: threading.Thread, function: str) -> bool:
    """Whether a thread is in a function of that name, there in C, or in a wait of a condition or an event."""
    names = _functions_of(thread)
    return bool(names) and names[0] in (*_BLOCKING, function) and function in names


def when_waiting(thread: threading.Thread, function: str, act: Callable[[], object]) -> Running[None]:
    """Do something as soon as `thread` waits in a function of that name.

    It is done, too, where looking for that fails: the thread then goes on, and `outcome` tells why.
    """

    def run() -> None:
        try:
            wait_until(lambda: is_waiting(thread, function), f"{thread.name} did not wait in {function}")
        finally:
            act()

    return Running(run)


def wait_until_listening(process: subprocess.Popen[Any], port: int) -> None:
    """Wait until somebody listens on a port of the loopback; fail if the process ends instead."""

    def listens() -> bool:
        assert process.poll() is None, "the server has ended"
        with socket.socket() as ours:
            ours.settimeout(1)
            return ours.connect_ex(("127.0.0.1", port)) == 0

    wait_until(listens, "the server does not come up")


@contextmanager
def child_process(
    *command: object, limit_s: float = PATIENCE_S, **options: Any
) -> Iterator[subprocess.Popen[Any]]:
    """A process that is killed after `limit_s`, and at the block's end: reads of its output end then, too."""
    process = subprocess.Popen([*map(str, command)], **options)
    kill = threading.Timer(limit_s, process.kill)
    kill.daemon = True
    kill.start()
    try:
        yield process
    finally:
        kill.cancel()
        process.kill()
        process.wait(PATIENCE_S)
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def _functions_of(thread: threading.Thread) -> list[str]:
    """The names of the functions that a thread is in, the innermost first; none once it has ended.

    `faulthandler` writes them down while no other thread can run. Walking `f_back` from `sys._current_frames()` lets
    the thread go on in between, and CPython 3.11 then sometimes gives another object in a frame's place.
    """
    with tempfile.TemporaryFile() as stacks:
        faulthandler.dump_traceback(stacks, all_threads=True)
        stacks.seek(0)
        lines = stacks.read().decode(errors="replace").splitlines()
    names: list[str] = []
    is_its = False
    for line in lines:
        if head := _THREAD.match(line):
            is_its = int(head[1], 16) == thread.ident
        elif is_its and (frame := _FRAME.match(line)):
            names.append(frame[1])
    return names
