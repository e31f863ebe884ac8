"""For how long the host pool asks for no memory after the allocator has refused."""

from __future__ import annotations

import time
from collections.abc import Callable

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0


class GrowthPause:
    """A pause in asking the allocator for memory, after it has refused at least twice in a row.

    After one refusal the next fill asks again. From the second on there is a pause, which doubles with each refusal.
    Only a fill that meets a refusal fails; in a pause, fills use the memory that the pool has. So a lasting limit, such
    as one of locked memory, does not fail every later fill. Not thread-safe; the pool's lock guards it.
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
        """Whether the pause lasts, so that the allocator must not be asked."""
        return self._in_a_row > 1 and self._clock() < self._until_s
