"""The OpenAI API through the tiers, with the real client; stock llama-server is what it is compared with."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import openai
import pytest

from expertier.errors import BusyError
from failures.failing_reads import FailingReads
from limits.waits import PATIENCE_S
from servers.served import complete, wait_until_idle

PROMPTS = (
    "a few words",
    "Once upon a time there was",
    "x",
    "The quick brown fox jumps over the lazy dog. " * 5,
)
MESSAGES = [{"role": "user", "content": "tell me a story"}]


def chat(client: openai.OpenAI, n: int = 24) -> str | None:
    answer = client.chat.completions.create(model="any", messages=MESSAGES, max_tokens=n, temperature=0)
    return answer.choices[0].message.content


@pytest.mark.parametrize("prompt", PROMPTS)
def test_completions_equal_stock(client, stock, prompt):
    assert complete(client, prompt) == complete(stock, prompt)


def test_chat_equals_stock(client, stock):
    text = chat(client)
    assert text
    assert text == chat(stock)


def test_streams_equal_what_comes_whole(client):
    parts = client.completions.create(
        model="any", prompt=PROMPTS[1], max_tokens=24, temperature=0, stream=True
    )
    pieces = [part.choices[0].text for part in parts]
    assert len(pieces) >= 20
    assert "".join(pieces) == complete(client, PROMPTS[1])

    parts = client.chat.completions.create(
        model="any", messages=MESSAGES, max_tokens=24, temperature=0, stream=True
    )
    assert "".join(part.choices[0].delta.content or "" for part in parts) == chat(client)


def test_the_model_goes_by_its_own_name(client, model):
    assert [entry.id for entry in client.models.list()] == [model.name]


def test_each_graph_runs_on_our_device_in_one_piece(server, client):
    """One graph for the prompt and one for each token after the first: the engine has split none."""
    before = server.binding.counters().graphs
    complete(client, "a prompt that nobody asked before", 16)
    assert server.binding.counters().graphs - before == 16


def test_four_at_once(server, client):
    with ThreadPoolExecutor(4) as pool:
        answers = list(
            pool.map(
                lambda prompt: client.completions.create(
                    model="any", prompt=prompt, max_tokens=40, temperature=0
                ),
                PROMPTS,
                timeout=PATIENCE_S,
            )
        )
    assert [answer.usage.completion_tokens for answer in answers] == [40] * 4
    assert all(answer.choices[0].text for answer in answers)
    wait_until_idle(server)
    server.tiers.check_valid()


def test_cancel_in_the_middle_of_a_stream(server, client, stock):
    stream = client.completions.create(
        model="any", prompt="go on", max_tokens=400, temperature=0, stream=True
    )
    for _ in range(3):
        next(stream)
    before = server.binding.counters().graphs
    stream.close()
    wait_until_idle(server)
    assert server.binding.counters().graphs - before < 300, "it went on for a client that had left"
    assert complete(client) == complete(stock)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_failed_read_fails_that_request_alone(server, client, monkeypatch, streamed):
    def ask(prompt):
        answer = client.completions.create(
            model="any", prompt=prompt, max_tokens=60, temperature=0, stream=streamed
        )
        return list(answer) if streamed else answer

    expected = complete(client)
    failures = server.tiers.stats().file.failures
    seen: list[BaseException | None] = []
    server.binding.on_fill = seen.append
    with monkeypatch.context() as patch:
        reads = FailingReads(patch)
        reads.fail_call(3)
        with pytest.raises(openai.APIError) as caught:
            ask(f"something else {streamed}")
        assert reads.failed == 1
    server.binding.on_fill = None
    assert "Compute error" in str(caught.value)
    assert [type(error).__name__ for error in seen if error is not None] == ["SourceError"]
    assert server.tiers.stats().file.failures == failures + 1
    assert complete(client) == expected
    server.tiers.check_valid()


def test_web_pages_of_others_get_no_leave(server):
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port), 30) as raw:
        raw.sendall(
            b"GET /v1/models HTTP/1.1\r\nHost: x\r\nOrigin: https://evil.example\r\nConnection: close\r\n\r\n"
        )
        answer = b"".join(iter(lambda: raw.recv(65536), b""))
    assert b"Access-Control-Allow-Origin: *" not in answer
    assert b"evil.example" not in answer


def test_a_second_server_is_refused(server, start):
    assert server.url
    with pytest.raises(BusyError, match="already serves"):
        start()
