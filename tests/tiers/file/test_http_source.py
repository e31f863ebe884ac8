"""A source that is no file: HTTP ranges from a server on loopback, behind the tiers."""

from __future__ import annotations

import http.client
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

import expertier as et
from expertier.errors import SourceError
from expertier.hip.host import HostDevice
from expertier.tiers.model.span import Span
from model_files.gguf_files import Block, ModelFile, write_model


class RangeServer(ThreadingHTTPServer):
    """Serves ranges of one sequence of bytes; breaks as told."""

    daemon_threads = True

    def __init__(self, data: bytes) -> None:
        super().__init__(("127.0.0.1", 0), RangeHandler)
        self.data = data
        self.n_requests = 0
        self.broken: str | None = None


class RangeHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: RangeServer

    def do_GET(self) -> None:
        self.server.n_requests += 1
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"])
        assert found is not None
        body = self.server.data[int(found[1]) : int(found[2]) + 1]
        if self.server.broken == "status":
            self.send_error(503)
            return
        self.send_response(206)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.server.broken == "connection":
            self.wfile.write(body[: len(body) // 2])
            self.close_connection = True
            return
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


class HttpSource:
    """A `ByteSource` over HTTP ranges, with a connection a thread."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._local = threading.local()
        self._connections: list[http.client.HTTPConnection] = []

    def read_into(self, span: Span, buffer: memoryview) -> None:
        if not hasattr(self._local, "connection"):
            self._local.connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
            self._connections.append(self._local.connection)
        connection = self._local.connection
        try:
            connection.request("GET", "/m.gguf", headers={"Range": f"bytes={span.offset}-{span.end - 1}"})
            with connection.getresponse() as response:
                if response.status != 206:
                    raise SourceError(f"asked for {span}: the server answered {response.status}")
                done = 0
                while done < span.n_bytes:
                    n_read = response.readinto(buffer[done:])
                    if n_read == 0:
                        raise SourceError(f"asked for {span}: the connection ended after {done} bytes")
                    done += n_read
        except BaseException:
            connection.close()  # is opened again at the next request
            raise

    def close(self) -> None:
        """Close the connections, after the last read."""
        for connection in self._connections:
            connection.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFile:
    return write_model(
        tmp_path_factory.mktemp("model") / "m.gguf", [Block(n_experts=10), Block(n_experts=10)]
    )


@pytest.fixture
def server(model: ModelFile) -> Iterator[RangeServer]:
    server = RangeServer(model.bytes)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join(30)
    server.server_close()


@pytest.mark.parametrize(
    ("pool_pages", "n_steps"),
    [(6, 12), *(pytest.param(pages, 40, marks=pytest.mark.deep) for pages in (0, 6))],
)
def test_tiers_over_http(model: ModelFile, server: RangeServer, pool_pages: int, n_steps: int) -> None:
    budget = sum(demand.bytes_for(4) for demand in model.table.layer_demands())
    config = et.TierConfig(expert_cache_bytes=budget, host_pool_bytes=pool_pages * 4096)
    source = HttpSource(server.server_port)
    model_moved = model.path.with_name("elsewhere")
    model.path.rename(model_moved)  # no byte can come from the file
    try:
        with (
            HostDevice() as device,
            et.TierManager(model.table, device=device, config=config, source=source) as tiers,
        ):
            rng = np.random.default_rng(0)
            for step in range(n_steps):
                layer, experts = step % 2, rng.choice(10, 4, replace=False)
                if step in (4, 8):
                    server.broken = "status" if step == 4 else "connection"
                    with (
                        pytest.raises(SourceError, match=r"answered 503|ended after"),
                        tiers.acquire(layer, range(10)) as lease,
                    ):
                        list(lease.groups)
                    server.broken = None
                    tiers.check_valid()
                with tiers.acquire(layer, experts) as lease:
                    for group in lease.groups:
                        assert model.wrong_bytes(lease, group) == []
            tiers.check_valid()
            stats = tiers.stats().file
            assert stats.failures > 0
            assert server.n_requests >= stats.reads > 0
    finally:
        source.close()
        model_moved.rename(model.path)
