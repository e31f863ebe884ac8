"""Web pages of others, other names of this machine, other bodies than JSON: refused before the engine hears of it."""

from __future__ import annotations

import json
import os
from urllib.parse import urlsplit

import pytest

from expertier.engine_adapter.allowed_hosts import AllowedHosts
from expertier.engine_adapter.telemetry.metrics import MetricsServer, TierCollector
from expertier.errors import ConfigError
from servers.http_asking import COMPLETION, JSON, ask, refused
from servers.served import complete


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "10.0.0.7", ""]
)
@pytest.mark.parametrize(("path", "method"), [("/v1/completions", "POST"), ("/v1/models", "GET")])
def test_other_hosts_are_refused(server, host, path, method):
    graphs = server.binding.counters().graphs
    body = COMPLETION if method == "POST" else None
    refused(
        server.url, 403, "--allow-host", path=path, method=method, body=body, Host=host, Content_Type=JSON
    )
    assert server.binding.counters().graphs == graphs


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8080", "127.0.0.1", "127.9.9.9:1", "[::1]:8080"])
def test_names_of_loopback_are_answered(server, host):
    assert ask(server.url, Host=host, Content_Type=JSON)[0] == 200


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost.evil.example:8080"])
@pytest.mark.parametrize("kind", [JSON, "text/plain"])
def test_web_pages_of_others_are_refused(server, origin, kind):
    graphs = server.binding.counters().graphs
    refused(server.url, 403, "web page", Origin=origin, Content_Type=kind)
    refused(server.url, 403, "web page", Origin=origin, method="OPTIONS", body=None)
    assert server.binding.counters().graphs == graphs


def test_pages_of_this_machine_are_answered(server):
    assert ask(server.url, Origin="http://localhost:3000", Content_Type=JSON)[0] == 200
    assert ask(server.url, Origin="http://127.0.0.1:8080", method="OPTIONS", body=None)[0] == 200


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", None]
)
def test_bodies_that_are_no_json_are_refused(server, kind):
    """A page may send the first three kinds without asking for leave."""
    graphs = server.binding.counters().graphs
    refused(server.url, 415, "application/json", **({"Content_Type": kind} if kind else {}))
    assert server.binding.counters().graphs == graphs


def test_json_may_say_its_charset(server):
    assert ask(server.url, Content_Type="Application/JSON; charset=utf-8")[0] == 200


@pytest.mark.parametrize(
    ("host", "asked", "came_in_at", "allowed"),
    [
        ("myhost", "myhost:80", None, True),
        ("MyHost.", "myhost", None, True),
        ("192.168.1.5", "192.168.1.5:8080", None, True),
        ("192.168.1.5", "192.168.1.6:8080", "192.168.1.5", False),
        ("0.0.0.0", "192.168.1.5:8080", "192.168.1.5", True),
        ("0.0.0.0", "192.168.1.6:8080", "192.168.1.5", False),
        ("0.0.0.0", "evil.example", "192.168.1.5", False),
        ("::", "192.168.1.5", "::ffff:192.168.1.5", True),
        ("::", "[fe80::7]:80", "fe80::7", True),
        ("127.0.0.1", "[::ffff:127.0.0.1]", None, True),
        ("127.0.0.1", "user@localhost", None, False),
        ("127.0.0.1", "localhost:x", None, False),
        ("127.0.0.1", "localhost, evil.example", None, False),
        ("127.0.0.1", None, None, False),
    ],
)
def test_what_a_host_has_to_be(host, asked, came_in_at, allowed):
    assert AllowedHosts.of(host).allows_host(asked, came_in_at) is allowed


def test_what_would_end_the_process_is_refused(server, client):
    """Each of these ended it."""
    grammar = {"prompt": "a", "grammar": "root ::= " + "(" * 50_000 + '"a"' + ")" * 50_000}
    schema = '{"items":' * 20_000 + "{}" + "}" * 20_000
    message = '"messages": [{"role": "user", "content": "a"}]'
    for path, body, said in (
        ("/completion", json.dumps(grammar), "at most 2048"),
        ("/v1/chat/completions", f'{{{message}, "chat_template_kwargs": {{"x": {schema}}}}}', "128 levels"),
        (
            "/v1/chat/completions",
            f'{{{message}, "response_format": {{"type": "json_schema", "json_schema": {{"schema": {schema}}}}}}}',
            "128 levels",
        ),
    ):
        refused(server.url, 400, said, path=path, body=body.encode(), Content_Type=JSON)
    assert complete(client, n=2)


def test_schemas_go_through(client):
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": "abc"}}}
    messages = [{"role": "user", "content": "a"}]
    answer = client.chat.completions.create(
        model="any", messages=messages, max_tokens=40, response_format=schema, temperature=0
    )
    assert (answer.choices[0].message.content or "").strip().startswith('"ab')


def test_names_as_users_give_them():
    hosts = AllowedHosts.of("127.0.0.1", ["box.lan:8080", "[fe80::7]:80", "fe80::8", "Other.lan."])
    for name in ("box.lan", "box.lan:1", "[fe80::7]", "[fe80::8]:80", "other.lan"):
        assert hosts.allows_host(name)
    for wrong in ("http://box.lan", "box.lan/", "*", ""):
        with pytest.raises(ConfigError, match="no name or address"):
            AllowedHosts.of("127.0.0.1", [wrong])


def test_metrics_are_not_for_others(server):
    collector = TierCollector(server.tiers.stats, server.binding.counters)
    with MetricsServer(collector, 0, AllowedHosts.of("127.0.0.1", ["box.lan"])) as metrics:
        get = {"path": "/metrics", "method": "GET", "body": None}
        refused(metrics.url, 403, "--allow-host", Host="evil.example", **get)
        refused(metrics.url, 403, "evil.example", Origin="https://evil.example", **get)
        for host in ("127.0.0.1", "localhost:9", "box.lan"):
            status, text = ask(metrics.url, Host=host, **get)
            assert status == 200
            assert b"expertier_l1_hits_total" in text


def test_the_server_itself_is_behind_a_folder_of_this_user(server):
    path = urlsplit(server._server.listening_address).path
    assert os.stat(os.path.dirname(path)).st_mode & 0o777 == 0o700  # noqa: PTH116, PTH120
