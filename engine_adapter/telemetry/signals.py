"""Signals answered on a thread: in a Python program, and in a program of C whose process Python is a guest of."""

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

    Not in the handler: that would run between any two instructions of the main thread, which may hold a lock
    that the action needs. To be entered on the main thread.
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
    """Have `action` run, on a thread of its own, at each signal `number` until the process ends; whether it will.

    For a process whose main thread runs no Python, so that no handler written in Python would be called. What
    Python's handler in C does at once, on whatever thread got the signal, is to write to the wake-up descriptor:
    that is what the thread reads. Calls that the signal meets are restarted, where the kernel can do that. A signal
    that the program handles or ignores by itself is left to it. To be called on the thread that started Python.
    """
    if signal.getsignal(number) is not signal.SIG_DFL:
        _log.warning("%s is taken by the program itself, so no summary is logged at it", number.name)
        return False
    readable, writable = os.pipe()  # not inherited by what the program starts
    os.set_blocking(writable, False)

    def wait() -> None:
        while os.read(readable, 1):
            try:
                action()
            except Exception:  # the next signal would end the process if nobody read it any more
                _log.exception("no answer to %s", number.name)

    threading.Thread(target=wait, name=f"expertier-{number.name}", daemon=True).start()
    signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    signal.signal(number, lambda *_: None)
    signal.siginterrupt(number, False)
    return True
