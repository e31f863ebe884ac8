"""The switches and counters of a loaded fake driver."""

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
"""The counters of resources that a program has to give back."""


class FakeDriver:
    """Controls a fake driver through calls that no vendor's driver has. `fake.h` lists the switches and counters.

    The library has one state in the process, however many objects of this class open it.
    """

    def __init__(self, path: Path) -> None:
        """Load the library at `path`, or use it where it is loaded already."""
        self._library = ctypes.CDLL(str(path))
        self._library.expertier_fake_set.argtypes = (ctypes.c_char_p, ctypes.c_longlong)
        self._library.expertier_fake_get.argtypes = (ctypes.c_char_p, ctypes.POINTER(ctypes.c_longlong))
        self._library.expertier_fake_fail.argtypes = (ctypes.c_char_p, ctypes.c_longlong, ctypes.c_int)
        self._library.expertier_fake_fail.restype = None
        self._library.expertier_fake_reset.restype = None

    def set(self, name: str, value: int) -> None:
        """Set a switch. Raises `KeyError` where there is no such switch."""
        if self._library.expertier_fake_set(name.encode(), value):
            raise KeyError(name)

    def get(self, name: str) -> int:
        """Return the value of a switch or counter. Raises `KeyError` where there is none of that name."""
        value = ctypes.c_longlong()
        if self._library.expertier_fake_get(name.encode(), ctypes.byref(value)):
            raise KeyError(name)
        return value.value

    def fail(self, call: str, nth: int = 1, code: int = 2) -> None:
        """Have the `nth` call of a driver function from now on return `code`; an `nth` of 0 cancels that."""
        self._library.expertier_fake_fail(call.encode(), nth, code)

    def reset(self) -> None:
        """Set every switch to its value in the environment, and let devices that failed work again."""
        self._library.expertier_fake_reset()

    def live(self) -> dict[str, int]:
        """Return how many resources of each kind are not given back yet; kinds with none are left out."""
        counts = {name: self.get(name) for name in LIVE}
        return {name: count for name, count in counts.items() if count}

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep all streams from doing work for the length of a `with` block."""
        self.set("held", 1)
        try:
            yield
        finally:
            self.set("held", 0)
