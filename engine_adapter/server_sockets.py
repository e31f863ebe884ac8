"""Closes the Unix socket of a server of this process that has no call for it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

_POLL_S = 0.01


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
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed since it was listed, or no socket
            duplicate = os.dup(int(link.name))
            try:
                connection = socket.socket(fileno=duplicate)
            except OSError:
                os.close(duplicate)
                raise
            yield connection
