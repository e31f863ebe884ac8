"""Closes the Unix socket of a server of this process that has no call for it."""

from __future__ import annotations

import os
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

_POLL_S = 0.01
_OPEN_FILES = Path("/proc/self/fd")
_MOST_FILES = 1 << 16


def shut_sockets(url: str, timeout_s: float) -> bool:
    """Shut the listening socket of `url` and all connections to it; return whether all are gone in time.

    Their owner closes them when it is done with what it did for them: as if all clients had left.
    """
    path = urlsplit(url).path
    deadline = time.monotonic() + timeout_s
    while True:
        n_open = 0
        for connection in _sockets():
            with connection:
                if connection.family == socket.AF_UNIX and connection.getsockname() == path:
                    n_open += 1
                    with suppress(OSError):  # it is shut already
                        connection.shutdown(socket.SHUT_RDWR)
        if n_open == 0 or time.monotonic() > deadline:
            return n_open == 0
        time.sleep(_POLL_S)


def _sockets() -> Iterator[socket.socket]:
    """Yield a duplicate of each socket of this process."""
    for descriptor in _descriptors():
        with suppress(OSError):  # closed since it was listed, or no socket
            duplicate = os.dup(descriptor)
            try:
                connection = socket.socket(fileno=duplicate)
            except OSError:
                os.close(duplicate)
                raise
            yield connection


def _descriptors() -> list[int]:
    """Return numbers that may be open files of this process: those that are, or all where there is no /proc."""
    try:
        return [int(link.name) for link in _OPEN_FILES.iterdir()]
    except OSError:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return list(range(min(soft, _MOST_FILES) if soft != resource.RLIM_INFINITY else _MOST_FILES))
