"""A lock and a condition for every layer, shared with an engine's C++ threads.

128 bytes a layer in memory that Python owns: a `pthread_mutex_t` at 0 and a `pthread_cond_t` with default
attributes at 64. They guard the layer's part of the residency tables. Whoever changes what another could wait
for (`complete`, `abort`, `release`) calls `notify_all` before it unlocks.

Order of locks, in Python as in C++: a layer's lock is a leaf. Whoever holds one takes no other lock, neither
another layer's nor one of Python's; and whoever holds one of Python's takes no layer's. The interpreter's own
lock is no exception to fear: C++ does not ask for it while it holds a layer's, and Python lets go of it
before it blocks on one.
"""

from __future__ import annotations

import ctypes
import errno
import os
import time
from types import TracebackType
from typing import Any

import numpy as np

from expertier.interrupts import interrupts_deferred, raise_pending

LAYER_BYTES = 128
CONDITION_OFFSET = 64

_MUTEX_ERRORCHECK = 2  # PTHREAD_MUTEX_ERRORCHECK of glibc and musl
_POLL_INTERVAL_NS = 50_000_000


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def wait_deadline() -> _Timespec:
    """Return when a wait that begins now has to end, so that the main thread can act on a signal such as Ctrl-C."""
    return _Timespec(*divmod(time.time_ns() + _POLL_INTERVAL_NS, 1_000_000_000))


class _Pthread:
    """The functions of libc that are used here.

    Those that may block release the interpreter meanwhile; the short ones keep it.
    """

    def __init__(self) -> None:
        blocking: Any = ctypes.CDLL(None)
        short: Any = ctypes.PyDLL(None)
        self.lock = blocking.pthread_mutex_lock
        self.wait = blocking.pthread_cond_timedwait
        self.try_lock = short.pthread_mutex_trylock
        self.unlock = short.pthread_mutex_unlock
        self.notify_all = short.pthread_cond_broadcast
        self.mutex_init = short.pthread_mutex_init
        self.mutex_destroy = short.pthread_mutex_destroy
        self.condition_init = short.pthread_cond_init
        self.condition_destroy = short.pthread_cond_destroy
        self.attributes_init = short.pthread_mutexattr_init
        self.attributes_set_type = short.pthread_mutexattr_settype
        self.attributes_destroy = short.pthread_mutexattr_destroy


class _Held:
    """One layer's lock for the length of a `with` block, in which interrupts wait."""

    __slots__ = ("_mutex", "_pthread", "_region")

    def __init__(self, pthread: _Pthread, mutex: ctypes.c_void_p) -> None:
        self._pthread = pthread
        self._mutex = mutex
        self._region = interrupts_deferred()

    def __enter__(self) -> None:
        """Take the lock; trying first keeps the interpreter in the usual case that nobody holds it."""
        self._region.__enter__()
        status = 0
        if self._pthread.try_lock(self._mutex) != 0:
            status = self._pthread.lock(self._mutex)
        if status != 0:
            self._region.__exit__(None, None, None)
            raise AssertionError(f"layer lock: {os.strerror(status)}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give the lock back."""
        self._pthread.unlock(self._mutex)
        self._region.__exit__(kind, error, trace)


class LayerLocks:
    """The locks and conditions of all layers. `close` destroys them; nobody may hold or wait for one then."""

    def __init__(self, n_layers: int) -> None:
        """Make unlocked locks for layers 0 to `n_layers - 1`."""
        self._pthread = _Pthread()
        # A cache line of 64 bytes or a pair of them is not shared by two layers.
        self._memory = np.zeros((n_layers + 1) * LAYER_BYTES, np.uint8)
        self._address = -(-int(self._memory.ctypes.data) // LAYER_BYTES) * LAYER_BYTES
        attributes = ctypes.create_string_buffer(64)
        self._pthread.attributes_init(attributes)
        self._pthread.attributes_set_type(attributes, _MUTEX_ERRORCHECK)
        self._mutexes = [ctypes.c_void_p(self._address + i * LAYER_BYTES) for i in range(n_layers)]
        self._conditions = [
            ctypes.c_void_p(self._address + i * LAYER_BYTES + CONDITION_OFFSET) for i in range(n_layers)
        ]
        for mutex, condition in zip(self._mutexes, self._conditions, strict=True):
            assert self._pthread.mutex_init(mutex, attributes) == 0
            assert self._pthread.condition_init(condition, None) == 0
        self._pthread.attributes_destroy(attributes)
        self._closed = False

    @property
    def address(self) -> int:
        """Where layer 0's 128 bytes begin; the other layers' follow."""
        return self._address

    def held(self, layer: int) -> _Held:
        """Return the layer's lock as a context manager; it cannot be taken twice by one thread.

        For what is done with it in Python. The policy's calls take the lock themselves
        (`planner/policy/calls/locked_calls.py`).
        """
        return _Held(self._pthread, self._mutexes[layer])

    def wait(self, layer: int) -> None:
        """Let go of the layer's lock, which the caller holds, until someone notifies; then hold it again.

        Returns after 50 ms at the latest: look at the state again and wait again. Raises an interrupt that has come.
        """
        deadline = wait_deadline()
        status = self._pthread.wait(self._conditions[layer], self._mutexes[layer], ctypes.byref(deadline))
        assert status in (0, errno.ETIMEDOUT), f"layer {layer}: {os.strerror(status)}"
        raise_pending()

    def notify_all(self, layer: int) -> None:
        """Wake everyone who waits for a change of the layer; the caller holds its lock."""
        self._pthread.notify_all(self._conditions[layer])

    def close(self) -> None:
        """Destroy the locks; a second call does nothing."""
        if not self._closed:
            self._closed = True
            for mutex, condition in zip(self._mutexes, self._conditions, strict=True):
                self._pthread.condition_destroy(condition)
                self._pthread.mutex_destroy(mutex)
