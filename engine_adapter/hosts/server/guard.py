"""Guards a server in this process: listens at the public address, and passes on the requests that are allowed.

llama-server itself listens on a Unix socket in a folder that only this user may enter, where no web page and no other
user reaches it. The guard is a thread with an event loop; see `guarded_connection.py` for what it does with a request.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from expertier.engine_adapter.allowed_hosts import AllowedHosts
from expertier.errors import ConfigError

_log = logging.getLogger(__name__)

_MAX_CONNECTIONS = 256
_BACKLOG = 128
_STOP_S = 10
_MAX_SOCKET_PATH_BYTES = 107  # the kernel's limit, without the zero at the end


class ServerGuard:
    """The public side of a server. It has its address from the start, and answers once `open` was called."""

    def __init__(self, host: str, port: int, hosts: AllowedHosts) -> None:
        """Take the address; clients are turned away until `open`. Raises ConfigError where it cannot be used."""
        try:  # imported late, as only serving needs the package
            from expertier.engine_adapter.hosts.server.guarded_connection import GuardedConnection
        except ImportError as missing:
            raise ConfigError(
                f"serving needs the package h11 ({missing}): pip install 'expertier[llama]', or pip install h11"
            ) from missing
        self._connection = GuardedConnection
        self._listener = bound_socket(host, port)
        self._hosts = hosts
        self._loop = asyncio.new_event_loop()
        self._thread: threading.Thread | None = None
        self._end = asyncio.Event()
        self._clients: set[asyncio.Task[None]] = set()
        address = self._listener.getsockname()
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{address[1]}"

    def open(self, server: Path) -> None:
        """Answer clients from now on, by the server that listens at this Unix socket.

        Raises ConfigError where another program listens at the address by now.
        """
        try:
            self._listener.listen(_BACKLOG)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {self.url}: {error.strerror}; give another --port"
            ) from error
        self._thread = threading.Thread(
            target=self._loop.run_until_complete,
            args=(self._run(server),),
            name="expertier-guard",
            daemon=True,
        )
        self._thread.start()

    def close(self) -> None:
        """Close the address and all connections; a second call does nothing."""
        if self._thread is not None:
            self._loop.call_soon_threadsafe(self._end.set)
            self._thread.join(_STOP_S)
            if self._thread.is_alive():
                _log.warning("connections of clients did not end within %d s", _STOP_S)
                return
            self._thread = None
        self._listener.close()
        if not self._loop.is_closed():
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def _run(self, server: Path) -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._clients.add(task)
            try:
                if len(self._clients) <= _MAX_CONNECTIONS:
                    await self._connection(reader, writer, self._hosts, server).serve()
            except asyncio.CancelledError:  # the guard is closed: nobody waits for this task's result
                pass
            except Exception:
                _log.exception("a client's connection failed")
            finally:
                self._clients.discard(task)
                writer.close()

        listening = await asyncio.start_server(serve, sock=self._listener, limit=1 << 16)
        await self._end.wait()
        listening.close()
        clients = [*self._clients]
        for task in clients:
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        await asyncio.sleep(0)  # the loop frees closed connections in its next round


@contextmanager
def private_socket() -> Iterator[Path]:
    """Yield a path for a Unix socket, in a folder that only this user may enter and that is removed at the end.

    Raises ConfigError where no such folder can be made.
    """
    parent = tempfile.gettempdir()
    try:
        if len(parent.encode()) + len("/expertier-12345678/llama.sock") > _MAX_SOCKET_PATH_BYTES:
            parent = "/tmp"
        folder = tempfile.TemporaryDirectory(prefix="expertier-", dir=parent, ignore_cleanup_errors=True)
    except OSError as error:
        raise ConfigError(
            f"no folder for the server's socket can be made in {parent}: {error.strerror or error}; set TMPDIR to a "
            "folder of yours"
        ) from error
    with folder as name:
        yield Path(name) / "llama.sock"


def bound_socket(host: str, port: int, option: str = "--port") -> socket.socket:
    """Return a socket with this address that does not listen yet.

    Raises ConfigError where the address cannot be used; `option` is the option that gave the port.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                with suppress(OSError):
                    listener.setsockopt(
                        socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0
                    )  # so that `::` serves IPv4 as well
            listener.bind(address)
        except BaseException:
            listener.close()
            raise
        return listener
    except (OSError, OverflowError, UnicodeError) as error:
        raise ConfigError(
            f"cannot listen on {host} port {port}: {getattr(error, 'strerror', None) or error}; "
            f"give another {'--host or ' if option == '--port' else ''}{option} (0: a free one)"
        ) from error
