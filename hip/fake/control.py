"""Switches and counters of a fake driver that is loaded."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LIVE = (
    "live_allocations",
    "live_pinned",
    "live_registered",
    "live_handles",
    "live_reservations",
    "live_streams",
    "live_events",
    "live_modules",
    "live_contexts",
)
"""Counters of what a program has to give back."""


class FakeDriver:
    """A fake driver's own interface, beside the vendor's. `fake.h` lists the switches and counters.

    The state is the library's: one for the process, however often it is opened.
    """

    def __init__(self, path: Path) -> None:
        """Load the library, or take the one that is loaded."""
        self._library = ctypes.CDLL(str(path))
        self._library.expertier_fake_set.argtypes = (ctypes.c_char_p, ctypes.c_longlong)
        self._library.expertier_fake_get.argtypes = (ctypes.c_char_p, ctypes.POINTER(ctypes.c_longlong))
        self._library.expertier_fake_fail.argtypes = (ctypes.c_char_p, ctypes.c_longlong, ctypes.c_int)
        self._library.expertier_fake_fail.restype = None
        self._library.expertier_fake_reset.restype = None

    def set(self, name: str, value: int) -> None:
        """Set a switch. Raises `KeyError` for one that does not exist."""
        if self._library.expertier_fake_set(name.encode(), value):
            raise KeyError(name)

    def get(self, name: str) -> int:
        """Return a switch or a counter. Raises `KeyError` for one that does not exist."""
        value = ctypes.c_longlong()
        if self._library.expertier_fake_get(name.encode(), ctypes.byref(value)):
            raise KeyError(name)
        return value.value

    def fail(self, call: str, nth: int = 1, code: int = 2) -> None:
        """Have the `nth` call from now of a driver function return `code`; `nth` 0 disarms."""
        self._library.expertier_fake_fail(call.encode(), nth, code)

    def reset(self) -> None:
        """Set every switch as the environment has it, and let faulty devices work again."""
        self._library.expertier_fake_reset()

    def live(self) -> dict[str, int]:
        """Return what is not given back, without what is zero."""
        counts = {name: self.get(name) for name in LIVE}
        return {name: count for name, count in counts.items() if count}

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep all streams from taking work inside the block."""
        self.set("held", 1)
        try:
            yield
        finally:
            self.set("held", 0)
