"""Who waits for experts now, so that reads that nobody waits for keep out of the way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType


class DemandReads:
    """Counts the calls that serve misses, and says when the last of them has ended. Thread-safe.

    A `with` block is one such call.
    """

    def __init__(self) -> None:
        """Start with none."""
        self._lock = threading.Lock()
        self._n = 0
        self.when_quiet: Callable[[], None] | None = None
        """Called by the thread whose call ended last, with no lock held; it must be quick and must not raise."""

    @property
    def under_way(self) -> bool:
        """Whether somebody waits; a hint, as it may have changed already."""
        return self._n > 0

    def __enter__(self) -> None:
        """Note that a call begins."""
        with self._lock:
            self._n += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Note that it has ended, however it did."""
        with self._lock:
            self._n -= 1
            quiet = not self._n
        if quiet and self.when_quiet is not None:
            self.when_quiet()
