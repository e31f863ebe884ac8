"""How long the host pool stops asking an allocator that has refused."""

from __future__ import annotations

import time
from collections.abc import Callable

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0


class GrowthPause:
    """A pause after refusals in a row: the first is retried at once, then it doubles with each refusal.

    So a refusal is an error of the fill that met it, and a limit that lasts (of locked memory, say) does not
    fail every fill after it. Not thread-safe; the pool's lock guards it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start without a pause."""
        self._clock = clock
        self._in_a_row = 0
        self._until_s = 0.0
        self.refusals = 0
        """How often the allocator has refused."""

    def refused(self) -> None:
        """Note that the allocator has refused."""
        self.refusals += 1
        self._in_a_row += 1
        if self._in_a_row > 1:
            pause_s = min(FIRST_PAUSE_S * 2.0 ** min(self._in_a_row - 2, 10), LONGEST_PAUSE_S)
            self._until_s = self._clock() + pause_s

    def granted(self) -> None:
        """Note that the allocator has given memory."""
        self._in_a_row = 0

    def is_on(self) -> bool:
        """Whether not to ask now."""
        return self._in_a_row > 1 and self._clock() < self._until_s
