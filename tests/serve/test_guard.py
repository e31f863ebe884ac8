"""The guard as a proxy: over a server that is a fake, and what reaches that one."""

from __future__ import annotations

import contextlib
import json
import runpy
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import h11
import pytest

from expertier.engine_adapter.allowed_hosts import AllowedHosts
from expertier.engine_adapter.hosts.server import guard as server_guard
from expertier.engine_adapter.hosts.server.guard import ServerGuard, private_socket
from expertier.engine_adapter.hosts.server.request_limits import MAX_BODY_BYTES
from expertier.errors import ConfigError
from limits.waits import wait_until
from servers.served import open_files, tasks

GET = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"


def post(body: bytes = b'{"a": 1}', more: bytes = b"") -> bytes:
    return (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        + more
        + b"Content-Length: %d\r\n\r\n" % len(body)
        + body
    )


class FakeServer:
    """Accepts connections at a Unix socket, one by one, as a test tells it to."""

    def __init__(self, path: Path) -> None:
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.settimeout(10)
        self.listener.bind(str(path))
        self.listener.listen()

    def accept(self) -> tuple[socket.socket, bytes]:
        """Return a connection and the whole request that came over it."""
        connection = self.listener.accept()[0]
        connection.settimeout(10)
        return connection, read_message(connection, h11.Connection(h11.SERVER))[1]

    def answer(self, text: bytes = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok") -> bytes:
        """Answer the next request with these bytes and close; return the request's body."""
        connection, body = self.accept()
        with connection:
            connection.sendall(text)
        return body


def read_message(connection: socket.socket, parser: h11.Connection) -> tuple[h11.Event, bytes]:
    """Return the head and the body of one message."""
    head, body = None, b""
    while True:
        event = parser.next_event()
        if event is h11.NEED_DATA:
            parser.receive_data(connection.recv(1 << 16))
        elif isinstance(event, h11.Data):
            body += bytes(event.data)
        elif isinstance(event, h11.EndOfMessage):
            return head, body
        elif isinstance(event, h11.ConnectionClosed):
            raise EOFError
        elif not isinstance(event, h11.InformationalResponse):
            head = event


class Client:
    """A client's connection, byte by byte."""

    def __init__(self, guard: ServerGuard) -> None:
        self.socket = socket.create_connection(("127.0.0.1", int(guard.url.rsplit(":", 1)[1])), 10)

    def answer(self, method: bytes = b"POST") -> tuple[int, bytes]:
        parser = h11.Connection(h11.CLIENT)
        parser.send(h11.Request(method=method, target="/", headers=[("Host", "x")]))
        parser.send(h11.EndOfMessage())
        head, body = read_message(self.socket, parser)
        return head.status_code, body


@pytest.fixture(scope="module")
def parts() -> Iterator[tuple[ServerGuard, FakeServer]]:
    threads, files = tasks(), open_files()
    with private_socket() as path, ServerGuard("127.0.0.1", 0, AllowedHosts.of("127.0.0.1")) as guard:
        fake = FakeServer(path)
        guard.open(path)
        yield guard, fake
        fake.listener.close()
    assert not path.parent.exists()
    wait_until(lambda: tasks() <= threads, "a thread is left")
    wait_until(lambda: open_files() <= files, "a file or socket is left")


@pytest.fixture
def fake(parts):
    return parts[1]


@pytest.fixture
def client(parts) -> Iterator[Client]:
    client = Client(parts[0])
    with client.socket:
        yield client


def test_several_requests_on_one_connection(client, fake):
    for i in range(3):
        client.socket.sendall(post(b'{"n": %d}' % i))
        assert fake.answer() == b'{"n":%d}' % i
        assert client.answer() == (200, b"ok")


def test_requests_sent_ahead_are_answered_in_order(client, fake):
    client.socket.sendall(post(b"[1]") + post(b"[2]"))
    for body in (b"[1]", b"[2]"):
        assert fake.answer() == body
    parser = h11.Connection(h11.CLIENT)
    parser.send(h11.Request(method="GET", target="/", headers=[("Host", "x")]))
    parser.send(h11.EndOfMessage())
    assert read_message(client.socket, parser)[1] == b"ok"
    parser.start_next_cycle()
    parser.send(h11.Request(method="GET", target="/", headers=[("Host", "x")]))
    parser.send(h11.EndOfMessage())
    assert read_message(client.socket, parser)[1] == b"ok"


def test_each_piece_of_a_stream_comes_at_once(client, fake):
    client.socket.sendall(post())
    connection, _ = fake.accept()
    with connection:
        connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for i in range(3):
            connection.sendall(b"8\r\ndata: %d\n\r\n" % i)
            received = b""
            while b"data: %d\n" % i not in received:
                received += client.socket.recv(1000)  # ends by its time limit where a piece is kept back
        connection.sendall(b"0\r\n\r\n")
        while not received.endswith(b"0\r\n\r\n"):
            received += client.socket.recv(1000)


@pytest.mark.parametrize("begun", [False, True])
def test_a_client_that_leaves_ends_its_request(client, fake, begun):
    client.socket.sendall(post())
    connection, _ = fake.accept()
    with connection:
        if begun:
            connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n")
            client.socket.recv(1000)
        client.socket.close()
        assert connection.recv(1) == b"", "the server still thinks that somebody listens"


def test_a_server_that_leaves_before_its_answer(client, fake):
    client.socket.sendall(post())
    fake.answer(b"")
    status, text = client.answer()
    assert status == 502
    assert "llama-server" in json.loads(text)["error"]["message"]
    client.socket.sendall(GET)
    fake.answer()
    assert client.answer() == (200, b"ok")


def test_a_server_that_leaves_in_the_middle(client, fake):
    client.socket.sendall(post())
    fake.answer(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc")
    with pytest.raises((h11.RemoteProtocolError, EOFError)):
        client.answer()


def test_a_server_that_answers_before_it_has_read(client, fake):
    """As llama-server does where the key is wrong."""
    client.socket.sendall(post(b'{"prompt": "' + b"a" * 8_000_000 + b'"}'))
    connection = fake.listener.accept()[0]
    with connection:
        connection.recv(100)
        connection.sendall(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 2\r\n\r\nno")
    assert client.answer() == (401, b"no")


def test_headers_that_are_not_for_the_server_stay_here(client, fake):
    client.socket.sendall(post(more=b"Authorization: Bearer k\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n"))
    connection = fake.listener.accept()[0]
    with connection:
        head, _ = read_message(connection, h11.Connection(h11.SERVER))
        names = dict(head.headers)
        assert names[b"authorization"] == b"Bearer k"
        assert names[b"connection"] == b"close"
        assert b"upgrade" not in names
        connection.sendall(b"HTTP/1.1 204 No Content\r\nKeep-Alive: timeout=5\r\n\r\n")
    assert client.answer()[0] == 204


def test_a_head_alone(client, fake):
    client.socket.sendall(GET.replace(b"GET", b"HEAD"))
    fake.answer(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n")
    assert client.answer(b"HEAD") == (200, b"")


def test_a_client_of_http_1_0(client, fake):
    client.socket.sendall(b"GET /health HTTP/1.0\r\nHost: localhost\r\n\r\n")
    fake.answer(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n")
    received = b"".join(iter(lambda: client.socket.recv(1000), b""))
    assert received.endswith(b"\r\n\r\nok")


def test_a_body_in_pieces_that_waits_for_leave(client, fake):
    client.socket.sendall(
        b"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\nExpect: 100-continue\r\n\r\n"
    )
    assert client.socket.recv(1000).startswith(b"HTTP/1.1 100 ")
    client.socket.sendall(b"2\r\n[1\r\n1\r\n]\r\n0\r\n\r\n")
    assert fake.answer() == b"[1]"
    assert client.answer() == (200, b"ok")


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (GET.replace(b"localhost", b"evil.example"), 403),
        (post(more=b"Origin: https://evil.example\r\n"), 403),
        (post().replace(b"application/json", b"text/plain"), 415),
        (post(b"(" * 10), 400),
        (post(b"a" * (MAX_BODY_BYTES + 1)), 413),
        (post(more=b"Content-Encoding: gzip\r\n"), 415),
        (GET.replace(b"/v1/models", b"http://evil.example/v1/models"), 400),
        (b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (GET.replace(b"Host: localhost", b"Host: localhost\r\nHost: localhost"), 400),
        (GET.replace(b"Host: localhost\r\n", b""), 400),
        (b"what is this\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 200_000 + b"\r\n\r\n", 431),
        (
            b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            415,
        ),
    ],
)
def test_what_is_refused_never_reaches_the_server(client, fake, request_bytes, status):
    with contextlib.suppress(ConnectionError):  # it need not be read to its end
        client.socket.sendall(request_bytes)
    found, text = client.answer()
    assert found == status
    assert json.loads(text)["error"]["code"] == status
    fake.listener.settimeout(0)
    with pytest.raises(BlockingIOError):
        fake.listener.accept()
    fake.listener.settimeout(10)


def test_many_clients_at_once(parts):
    guard, fake = parts
    serving = threading.Thread(target=lambda: [fake.answer() for _ in range(40)], daemon=True)
    serving.start()
    clients = [Client(guard) for _ in range(40)]
    for client in clients:
        client.socket.sendall(post())
    assert [client.answer() for client in clients] == [(200, b"ok")] * 40
    for client in clients:
        client.socket.close()
    serving.join(20)
    assert not serving.is_alive()


def test_closing_ends_connections_and_a_taken_address_is_refused():
    with private_socket() as path:
        fake = FakeServer(path)
        guard = ServerGuard("localhost", 0, AllowedHosts.of("localhost"))
        guard.open(path)
        client = Client(guard)
        client.socket.sendall(post())
        connection, _ = fake.accept()
        with pytest.raises(ConfigError, match="cannot listen"):
            ServerGuard("localhost", int(guard.url.rsplit(":", 1)[1]), AllowedHosts.of("localhost"))
        guard.close()
        assert client.socket.recv(1) == b""
        assert connection.recv(1) == b""
        guard.close()
        for one in (client.socket, connection, fake.listener):
            one.close()


def test_without_the_package_everything_else_works(monkeypatch):
    """The command line imports the guard whatever is asked of it."""
    monkeypatch.setitem(sys.modules, "h11", None)
    monkeypatch.delitem(sys.modules, "expertier.engine_adapter.hosts.server.guarded_connection")
    fresh = runpy.run_path(server_guard.__file__)
    with pytest.raises(ConfigError, match="serving needs the package h11"):
        fresh["ServerGuard"]("127.0.0.1", 0, AllowedHosts.of("127.0.0.1"))


def test_a_temporary_folder_with_a_long_name(tmp_path, monkeypatch):
    long = tmp_path / ("a" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with private_socket() as path:
        assert len(str(path)) <= 107
        FakeServer(path).listener.close()
    monkeypatch.setattr("tempfile.tempdir", "/no/such")
    with pytest.raises(ConfigError, match="TMPDIR"), private_socket():
        pass
