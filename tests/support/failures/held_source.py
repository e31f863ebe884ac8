"""A source of made-up bytes whose reads wait until a test lets them."""

from __future__ import annotations

import threading

from expertier.testing import PatternSource
from expertier.tiers.model.span import Span


class HeldSource:
    """A source whose reads wait while it is held; `let` lets some of them through."""

    def __init__(self) -> None:
        self.inner = PatternSource()
        self.open = threading.Event()
        self.open.set()
        self.reads = 0
        self._let = threading.Semaphore(0)

    def let(self, n: int) -> None:
        """Let `n` of the reads that wait or come go on."""
        for _ in range(n):
            self._let.release()

    def read_into(self, span: Span, buffer: memoryview) -> None:
        """Read, once that is allowed; fails after half a minute."""
        self.reads += 1
        for _ in range(3000):
            if self.open.wait(0.01) or self._let.acquire(blocking=False):  # a pause: between two looks
                break
        else:
            raise AssertionError("nobody let this read go on")
        self.inner.read_into(span, buffer)
