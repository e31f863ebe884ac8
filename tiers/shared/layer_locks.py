"""A lock and a condition for every layer, shared with an engine's C++ threads.

Each layer has 128 bytes of memory that Python owns: a `pthread_mutex_t` at byte 0 and a `pthread_cond_t` with default
attributes at byte 64. They guard the layer's part of the residency tables. A thread that changes what other threads may
wait for (`complete`, `abort`, `release`) calls `notify_all` before it unlocks.

The order of locks is the same in Python and in C++. A thread that holds a layer's lock takes no other lock: neither
another layer's nor one of Python's. A thread that holds one of Python's locks takes no layer's lock. The interpreter's
own lock causes no deadlock either: C++ does not ask for it while it holds a layer's lock, and Python releases it before
it blocks on a layer's lock.
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
    """Return when a wait that begins now has to end, so that the main thread can look for a signal such as Ctrl-C."""
    return _Timespec(*divmod(time.time_ns() + _POLL_INTERVAL_NS, 1_000_000_000))


class _Pthread:
    """The functions of libc that are used here.

    Functions that may block release the interpreter during the call; the short ones keep it.
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
    """Holds one layer's lock for the length of a `with` block, in which interrupts are delayed."""

    __slots__ = ("_mutex", "_pthread", "_region")

    def __init__(self, pthread: _Pthread, mutex: ctypes.c_void_p) -> None:
        self._pthread = pthread
        self._mutex = mutex
        self._region = interrupts_deferred()

    def __enter__(self) -> None:
        """Take the lock. It is tried first: in the usual case it is free, and the interpreter need not be released."""
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
    """The locks and conditions of all layers. `close` destroys them; no thread may then hold or wait for one."""

    def __init__(self, n_layers: int) -> None:
        """Make unlocked locks for layers 0 to `n_layers - 1`."""
        self._pthread = _Pthread()
        # Aligned to 128 bytes, so that no two layers share a cache line or a pair of cache lines.
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
        """The address of layer 0's 128 bytes; those of the other layers follow."""
        return self._address

    def held(self, layer: int) -> _Held:
        """Return a context manager that holds the layer's lock; a thread cannot take it twice.

        It is for code in Python. The policy's calls take the lock themselves
        (`planner/policy/calls/locked_calls.py`).
        """
        return _Held(self._pthread, self._mutexes[layer])

    def wait(self, layer: int) -> None:
        """Release the layer's lock, which the caller holds, wait for a notification, and take the lock again.

        Returns after 50 ms at the latest, so the caller has to look at the state again and perhaps wait again. Raises
        an interrupt that came meanwhile.
        """
        deadline = wait_deadline()
        status = self._pthread.wait(self._conditions[layer], self._mutexes[layer], ctypes.byref(deadline))
        assert status in (0, errno.ETIMEDOUT), f"layer {layer}: {os.strerror(status)}"
        raise_pending()

    def notify_all(self, layer: int) -> None:
        """Wake all threads that wait for a change of the layer; the caller holds its lock."""
        self._pthread.notify_all(self._conditions[layer])

    def close(self) -> None:
        """Destroy the locks; a second call does nothing."""
        if not self._closed:
            self._closed = True
            for mutex, condition in zip(self._mutexes, self._conditions, strict=True):
                self._pthread.condition_destroy(condition)
                self._pthread.mutex_destroy(mutex)
