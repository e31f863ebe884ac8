"""Starting and stopping: nothing of a server stays, and what cannot start is refused with our words."""

from __future__ import annotations

import json
import socket
from urllib.parse import urlsplit

import openai
import pytest

from expertier.engine_adapter.hosts.server.server import ServerOptions, TieredServer
from expertier.errors import BudgetError, ConfigError, EngineError
from expertier.tiers.config.config import TierConfig
from limits.waits import wait_until
from model_files.gguf_files import write_model
from servers.http_asking import JSON, ask, refused
from servers.served import complete, open_files, tasks


def test_loading_leaves_nothing_behind(start):
    """The engine's trial graph got no expert's bytes, and whatever it was given is gone."""
    with start() as server:
        stats = server.tiers.stats()
        assert stats.file.bytes_read == stats.l1.bytes_in == 0
        assert server.binding.counters().graphs == 1
        assert server.binding.counters().fills == 0
        assert not any(
            server.tiers.managers[0]._residency.residents(layer)
            for layer in range(server.tiers.table.n_layers)
        )
        server.tiers.check_valid()


def test_stopping_ends_running_requests_and_leaves_nothing(start, connect):
    with start() as warm:  # the engine's log and our policy have threads and files that stay
        complete(connect(warm.url), n=2)
    threads, files = tasks(), open_files()
    server = start()
    client = connect(server.url)
    complete(client, n=2)  # leaves a connection open
    stream = client.completions.create(model="any", prompt="on and on", max_tokens=450, stream=True)
    next(stream)
    server.stop()
    with pytest.raises((openai.APIError, OSError)):
        complete(client)
    stream.close()
    client.close()
    server.stop()
    address = urlsplit(server.url)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((address.hostname, address.port), timeout=1).close()
    wait_until(lambda: tasks() <= threads, "threads are left")
    wait_until(lambda: open_files() <= files, "files or sockets are left")


def test_a_key_is_asked_for_and_names_that_were_given_are_answered(start, connect):
    with start(allowed_hosts=("box.lan",), api_key="secret") as server:
        assert complete(connect(server.url, "secret"), n=2)
        with pytest.raises(openai.AuthenticationError):
            complete(connect(server.url, "another"), n=2)
        key = {"Authorization": "Bearer secret", "Content_Type": JSON}
        assert ask(server.url, Host="box.lan:8080", **key)[0] == 200
        assert ask(server.url, Host="box.lan", Origin="http://box.lan:8080", **key)[0] == 200
        refused(server.url, 403, "'other.lan'", Host="other.lan", **key)
        assert ask(server.url, Host="box.lan", Content_Type=JSON)[0] == 401, "the key is still asked for"
        large = json.dumps({"prompt": "a" * 8_000_000}).encode()
        assert ask(server.url, body=large, Content_Type=JSON)[0] == 401, (
            "its answer comes before it reads the body"
        )


def test_what_cannot_start_leaves_room_for_what_can(start, engine, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="cannot listen"):
        start(port=taken.getsockname()[1])
    with pytest.raises(ConfigError, match="cannot listen"):
        start(host="no.such.host.invalid")
    with pytest.raises(BudgetError):
        start(TierConfig(expert_cache_bytes=1))
    with pytest.raises(EngineError, match="could not start"):
        TieredServer.start(
            engine, write_model(tmp_path / "no_model.gguf").table, TierConfig(), ServerOptions(port=0)
        )
    with start() as server:
        assert server.url.startswith("http://127.0.0.1:")
    assert engine.take_log(0) is not None


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.1.2.3", True), ("::1", True), ("localhost", True), ("0.0.0.0", False)],
)
def test_what_counts_as_loopback(host, loopback):
    assert ServerOptions(host=host).is_loopback is loopback
    assert ServerOptions().is_loopback
