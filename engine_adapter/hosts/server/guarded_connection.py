"""One client's connection to the guard: checks its requests, passes them on, and passes the answers back as they come.

    client ── TCP ──► look at the head ─► read and look at the body ─► Unix socket ──► llama-server
           ◄────────────────────────── each piece of the answer at once ◄────────────

Each request has a connection of its own to the server. When the client goes away, that connection is closed, and the
server ends the request as it does for a client of its own.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import h11

from expertier.engine_adapter.allowed_hosts import AllowedHosts
from expertier.engine_adapter.hosts.server.request_limits import (
    MAX_BODY_BYTES,
    RefusedRequestError,
    checked_body,
)

_PIECE_BYTES = 1 << 16
_MAX_HEAD_BYTES = 1 << 16
_STALLED_S = (
    75  # limit between requests, for a piece of a request, and for a client to take a piece of an answer
)
_LINGER_S = 2  # the time for a client that still sends to read why it was refused
_OF_ONE_CONNECTION = frozenset(
    {
        b"connection", b"expect", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding",
        b"upgrade",
    }
)  # fmt: skip
_TYPES = {403: "permission_error", 404: "not_found_error", 502: "server_error"}


class _RefusedError(Exception):
    """The error that a client gets instead of an answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class GuardedConnection:
    """A client's connection, until the client leaves or sends something that is not HTTP."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, hosts: AllowedHosts, server: Path
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._hosts = hosts
        self._server = server
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=_MAX_HEAD_BYTES)
        address = writer.get_extra_info("sockname")
        self._came_in_at = str(address[0]) if isinstance(address, tuple) else None

    async def serve(self) -> None:
        """Answer requests until the end of the connection."""
        with suppress(OSError, TimeoutError):  # the client is gone, or too slow
            while await self._serve_one():
                self._http.start_next_cycle()

    async def _serve_one(self) -> bool:
        """Answer one request; return whether another may come."""
        try:
            request = await self._event()
            if not isinstance(request, h11.Request):
                return False
            body = await self._looked_at(request)
            await self._hand_on(request, body)
        except _RefusedError as refusal:
            await self._refuse(refusal)
        except h11.RemoteProtocolError as error:
            if self._http.our_state is h11.SEND_BODY:
                return False  # the server's answer was cut short
            await self._refuse(_RefusedError(error.error_status_hint, f"this is no HTTP request: {error}"))
        return self._http.our_state is h11.DONE and self._http.their_state is h11.DONE

    async def _looked_at(self, request: h11.Request) -> bytes:
        """Return the request's body as it is to be passed on; refuse a request that is not allowed."""
        headers = {name: value.decode("latin-1") for name, value in request.headers}
        host, origin = headers.get(b"host"), headers.get(b"origin")
        if not self._hosts.allows_host(host, self._came_in_at):
            raise _RefusedError(
                403,
                f"the host {host!r} is not one that this server answers to: those are localhost, loopback addresses, "
                "and what it was started with; ask it by one of these, or start it with --allow-host and this name",
            )
        if not self._hosts.allows_origin(origin, self._came_in_at):
            raise _RefusedError(
                403,
                f"a web page of {origin!r} asks, and this server answers pages of localhost, of loopback addresses and "
                "of hosts that it was started with: start it with --allow-host and that page's host",
            )
        if not request.target.startswith(b"/") or request.method in (b"CONNECT", b"TRACE"):
            raise _RefusedError(
                400, "only paths such as /v1/models can be asked for, by GET, POST and the like"
            )
        has_body = b"transfer-encoding" in headers or headers.get(b"content-length", "0") != "0"
        if not has_body:
            await self._body()
            return b""
        kind = headers.get(b"content-type", "").split(";")[0].strip().lower()
        if kind != "application/json" or headers.get(b"content-encoding", "identity").lower() != "identity":
            raise _RefusedError(
                415,
                f"the body is {kind or 'of no named type'}, but this server reads JSON: send it uncompressed with "
                "Content-Type: application/json",
            )
        try:
            return checked_body(await self._body())
        except RefusedRequestError as error:
            raise _RefusedError(400, str(error)) from error

    async def _body(self) -> bytes:
        pieces: list[bytes] = []
        size = 0
        while True:
            if self._http.they_are_waiting_for_100_continue:
                await self._send(h11.InformationalResponse(status_code=100, headers=[]))
            event = await self._event()
            if isinstance(event, h11.EndOfMessage):
                return b"".join(pieces)
            if not isinstance(event, h11.Data):
                raise ConnectionResetError
            size += len(event.data)
            if size > MAX_BODY_BYTES:
                raise _RefusedError(
                    413,
                    f"the body has more than {MAX_BODY_BYTES} bytes, which is the limit: send a smaller body",
                )
            pieces.append(bytes(event.data))

    async def _event(self) -> Any:
        """Return the client's next event."""
        while (event := self._http.next_event()) is h11.NEED_DATA:
            async with asyncio.timeout(_STALLED_S):
                self._http.receive_data(await self._reader.read(_PIECE_BYTES))
        return event

    async def _hand_on(self, request: h11.Request, body: bytes) -> None:
        """Have the server answer, for as long as the client listens."""
        answering = asyncio.ensure_future(self._answer(request, body))
        leaving = asyncio.ensure_future(self._client_left())
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                raise ConnectionResetError
            await answering
        finally:
            for task in (answering, leaving):
                task.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)

    async def _client_left(self) -> None:
        """Return when the client has closed its side; save what it sends early for later."""
        early = 0
        while early < _MAX_HEAD_BYTES and (data := await self._reader.read(_PIECE_BYTES)):
            self._http.receive_data(data)
            early += len(data)
        if early >= _MAX_HEAD_BYTES:
            await asyncio.Event().wait()  # the client sends more requests than it reads answers

    async def _answer(self, request: h11.Request, body: bytes) -> None:
        http = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MAX_HEAD_BYTES)
        headers = [*_handed_on(request.headers, but=b"content-length"), (b"Connection", b"close")]
        if body or request.method not in (b"GET", b"HEAD", b"OPTIONS"):
            headers.append((b"Content-Length", b"%d" % len(body)))
        asked = h11.Request(method=request.method, target=request.target, headers=headers)
        sent = b"".join(http.send(event) or b"" for event in (asked, h11.Data(data=body), h11.EndOfMessage()))
        try:
            async with _asked(self._server, sent) as receive:
                while True:
                    said = http.next_event()
                    if said is h11.NEED_DATA:
                        http.receive_data(await receive())
                    elif isinstance(said, h11.Response):
                        headers = _handed_on(said.headers)
                        await self._send(
                            h11.Response(status_code=said.status_code, reason=said.reason, headers=headers)
                        )
                    elif isinstance(said, h11.Data | h11.EndOfMessage):
                        await self._send(said)
                        if isinstance(said, h11.EndOfMessage):
                            return
                    elif not isinstance(said, h11.InformationalResponse):
                        raise h11.RemoteProtocolError("the server ended before its answer did")
        except (OSError, h11.RemoteProtocolError) as error:
            if self._http.our_state is not h11.SEND_RESPONSE:
                raise
            raise _RefusedError(
                502, f"llama-server ended this request without an answer ({error})"
            ) from error

    async def _send(self, event: Any) -> None:
        self._writer.write(self._http.send(event) or b"")
        if (
            self._writer.transport.get_write_buffer_size()
        ):  # the client takes the answer more slowly than it comes
            async with asyncio.timeout(_STALLED_S):
                await self._writer.drain()

    async def _refuse(self, refusal: _RefusedError) -> None:
        """Answer with an error in llama-server's own form; the connection ends where the client still sends."""
        if self._http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        kind = _TYPES.get(refusal.status, "invalid_request_error")
        error = {"code": refusal.status, "message": str(refusal), "type": kind}
        text = json.dumps({"error": error}).encode()
        headers = [("Content-Type", "application/json; charset=utf-8"), ("Content-Length", str(len(text)))]
        is_over = self._http.their_state is h11.DONE
        headers += [] if is_over else [("Connection", "close")]
        await self._send(h11.Response(status_code=refusal.status, headers=headers))
        await self._send(h11.Data(data=text))
        await self._send(h11.EndOfMessage())
        if not is_over:  # if the connection closed while the client still sends, the answer would be lost
            self._writer.write_eof()
            async with asyncio.timeout(_LINGER_S):
                while await self._reader.read(_PIECE_BYTES):
                    pass


def _handed_on(headers: Any, but: bytes = b"") -> list[tuple[bytes, bytes]]:
    """Return the headers that are meant for the other end, not for this connection alone."""
    return [
        (name, value)
        for name, value in headers.raw_items()
        if name.lower() not in _OF_ONE_CONNECTION and name.lower() != but
    ]


@asynccontextmanager
async def _asked(server: Path, request: bytes) -> AsyncIterator[Callable[[], Awaitable[bytes]]]:
    """Send a request to the server and yield what receives the next bytes of its answer.

    It uses plain socket calls because the server may answer and close before it has read the request: a stream would
    then report the broken pipe instead of the answer.
    """
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.setblocking(False)
        await loop.sock_connect(connection, str(server))
        sending = asyncio.ensure_future(loop.sock_sendall(connection, request))
        try:
            yield lambda: loop.sock_recv(connection, _PIECE_BYTES)
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
