"""Closes the Unix socket of a server in this process, because the server has no call for that."""

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
    """Shut the listening socket of `url` and all connections to it; return whether all were gone in time.

    The server then closes its ends of the connections when it has finished their requests, as if all clients had left.
    """
    path = urlsplit(url).path
    deadline = time.monotonic() + timeout_s
    while True:
        n_open = 0
        for connection in _sockets():
            with connection:
                if connection.family == socket.AF_UNIX and connection.getsockname() == path:
                    n_open += 1
                    with suppress(OSError):  # the socket is shut already
                        connection.shutdown(socket.SHUT_RDWR)
        if n_open == 0 or time.monotonic() > deadline:
            return n_open == 0
        time.sleep(_POLL_S)


def _sockets() -> Iterator[socket.socket]:
    """Yield a duplicate of each socket of this process."""
    for descriptor in _descriptors():
        with suppress(OSError):  # closed since it was listed, or not a socket
            duplicate = os.dup(descriptor)
            try:
                connection = socket.socket(fileno=duplicate)
            except OSError:
                os.close(duplicate)
                raise
            yield connection


def _descriptors() -> list[int]:
    """Return the numbers of this process's open files, or all possible numbers where there is no /proc."""
    try:
        return [int(link.name) for link in _OPEN_FILES.iterdir()]
    except OSError:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return list(range(min(soft, _MOST_FILES) if soft != resource.RLIM_INFINITY else _MOST_FILES))
