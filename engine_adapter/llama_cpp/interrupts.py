"""Keeps Ctrl-C away from the middle of an engine call, and raises it afterwards."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def interrupts_deferred(on_interrupt: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Note a Ctrl-C instead of raising it inside; call `on_interrupt` at once, raise KeyboardInterrupt at the end.

    Python delivers a signal at the main thread's next bytecode, which during an engine call is one of our
    callbacks, at any of its instructions: an exception there would be lost in the engine's C++ frames. In other
    threads, and where the program has a SIGINT handler of its own, nothing is changed.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return
    interrupted = False

    def note(_signal: int, _frame: object) -> None:
        nonlocal interrupted
        interrupted = True
        on_interrupt()

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if interrupted:
            raise KeyboardInterrupt
