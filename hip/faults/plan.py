"""Decides which calls of a faulty device or source fail."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping

_log = logging.getLogger(__name__)


class FaultPlan:
    """Counts calls by operation and makes chosen calls fail, with a warning in the log; for tests and drills.

    `arm` sets which call of an operation fails next; calls of operations that are not armed pass. Thread-safe.
    """

    def __init__(self, fail_at: Mapping[str, int] | None = None) -> None:
        """Arm the operations of `fail_at`: 1 fails the next call, 2 the one after it."""
        self._lock = threading.Lock()
        self._left: dict[str, int] = {}
        self._make: dict[str, Callable[[str], BaseException]] = {}
        self.calls: Counter[str] = Counter()
        self.injected: Counter[str] = Counter()
        for operation, nth in (fail_at or {}).items():
            self.arm(operation, nth)

    def arm(self, operation: str, nth: int, make: Callable[[str], BaseException] | None = None) -> None:
        """Fail the `nth` call of `operation` from now, with the error that `make` builds from a message.

        Without `make`, with the error that the faulty object itself would raise.
        """
        if nth < 1:
            raise ValueError(f"asked for call {nth} of {operation} to fail: calls count from 1")
        _log.warning("fault injection is on: call %d of %s from now will fail", nth, operation)
        with self._lock:
            self._left[operation] = nth
            if make is None:
                self._make.pop(operation, None)
            else:
                self._make[operation] = make

    def disarm(self) -> None:
        """Let all operations pass from now on; the counts stay."""
        with self._lock:
            self._left.clear()
            self._make.clear()

    def error_for(self, operation: str, default: Callable[[str], BaseException]) -> BaseException | None:
        """Count a call of `operation`; return the error that the call has to raise, or None where it passes."""
        with self._lock:
            self.calls[operation] += 1
            left = self._left.get(operation)
            if left is None:
                return None
            if left > 1:
                self._left[operation] = left - 1
                return None
            del self._left[operation]
            make = self._make.pop(operation, default)
            self.injected[operation] += 1
            count = self.calls[operation]
        _log.warning("injected fault: call %d of %s fails", count, operation)
        return make(f"injected fault: call {count} of {operation}")

    def check(self, operation: str, default: Callable[[str], BaseException]) -> None:
        """Count a call of `operation`, and raise where it is planned to fail."""
        error = self.error_for(operation, default)
        if error is not None:
            raise error
