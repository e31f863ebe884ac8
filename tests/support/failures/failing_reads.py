"""Reads of expert bytes that fail on demand, below all of our own code: os.preadv."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable

import pytest


class FailingReads:
    """Stands in for os.preadv: counts its calls, and fails the one that it was told to, once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        self.failed = 0
        self.before_each: Callable[[], None] | None = None
        """Called at each read, before anything else happens."""
        self._fails_at: int | None = None
        self._thread: int | None = None
        real = os.preadv

        def preadv(descriptor, buffers, offset):
            self.calls += 1
            if self.before_each is not None:
                self.before_each()
            if self._is_due():
                self.failed += 1
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(descriptor, buffers, offset)

        monkeypatch.setattr(os, "preadv", preadv)

    def fail_call(self, n: int) -> None:
        """Have the n-th call from now on fail, of any thread."""
        self._fails_at = self.calls + n

    def fail_thread(self, thread: int | None = None) -> None:
        """Have every call of a thread fail (this one's, unless it is named)."""
        self._thread = thread if thread is not None else threading.get_ident()

    def heal(self) -> None:
        """Have none fail any more."""
        self._fails_at = self._thread = None

    def _is_due(self) -> bool:
        if self.calls == self._fails_at:
            self._fails_at = None
            return True
        return threading.get_ident() == self._thread
