"""Signals answered on a thread: in a Python program, and in a C program that Python is embedded in."""

from __future__ import annotations

import logging
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_log = logging.getLogger(__name__)


@contextmanager
def on_signal(number: signal.Signals, action: Callable[[], None]) -> Iterator[None]:
    """Have `action` run, on a thread of its own, each time the process gets signal `number` in the block.

    The action does not run in the handler, which may run between any two instructions of the main thread while that
    holds a lock that the action needs. Enter the block on the main thread.
    """
    arrived: queue.SimpleQueue[bool] = queue.SimpleQueue()  # its put() may be called from a signal handler

    def wait() -> None:
        while arrived.get():
            action()

    thread = threading.Thread(target=wait, name=f"expertier-{number.name}", daemon=True)
    thread.start()
    previous = signal.signal(number, lambda *_: arrived.put(True))
    try:
        yield
    finally:
        signal.signal(number, previous)
        arrived.put(False)
        thread.join()


def answer_signal(number: signal.Signals, action: Callable[[], None]) -> bool:
    """Have `action` run, on a thread of its own, at each signal `number` to the process's end; return whether it will.

    This is for a process whose main thread runs no Python, so that no handler written in Python would be called. On
    whatever thread gets the signal, Python's handler in C writes to the wake-up descriptor at once, and our thread
    reads it. System calls that the signal interrupts are restarted where the kernel can do that. A signal that the
    program handles or ignores by itself is left alone. Call this on the thread that started Python.
    """
    if signal.getsignal(number) is not signal.SIG_DFL:
        _log.warning("%s is taken by the program itself, so no summary is logged at it", number.name)
        return False
    readable, writable = os.pipe()  # processes that the program starts do not inherit it
    os.set_blocking(writable, False)

    def wait() -> None:
        while os.read(readable, 1):
            try:
                action()
            except Exception:  # this thread must live on, to read the next signal
                _log.exception("no answer to %s", number.name)

    threading.Thread(target=wait, name=f"expertier-{number.name}", daemon=True).start()
    signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    signal.signal(number, lambda *_: None)
    signal.siginterrupt(number, False)
    return True
