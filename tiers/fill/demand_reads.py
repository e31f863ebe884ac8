"""Whether a thread waits for experts now, so that background reads keep out of its way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType


class DemandReads:
    """Counts the calls that serve misses, and reports when the last of them has ended. Thread-safe.

    Each call is a `with` block on this object.
    """

    def __init__(self) -> None:
        """Start without calls."""
        self._lock = threading.Lock()
        self._n = 0
        self.when_quiet: Callable[[], None] | None = None
        """Called when no call runs any more, by the thread of the last one, without a lock.

        It must be quick and must not raise.
        """

    @property
    def under_way(self) -> bool:
        """Whether a call serves misses now. It is only a hint, which may be outdated at once."""
        return self._n > 0

    def __enter__(self) -> None:
        """Note that a call begins."""
        with self._lock:
            self._n += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Note that the call has ended, with an error or without."""
        with self._lock:
            self._n -= 1
            quiet = not self._n
        if quiet and self.when_quiet is not None:
            self.when_quiet()
