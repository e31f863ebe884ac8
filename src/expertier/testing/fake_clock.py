"""A clock that stands still until a test advances it."""

from __future__ import annotations


class FakeClock:
    """Call it for the time in seconds, as you would call `time.monotonic`."""

    def __init__(self, start_s: float = 0.0) -> None:
        """Start at `start_s`."""
        self._now_s = start_s

    def __call__(self) -> float:
        """Return the time."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        if seconds < 0:
            raise ValueError(f"time cannot pass by {seconds} s")
        self._now_s += seconds
