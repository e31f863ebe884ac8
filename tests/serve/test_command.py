"""`expertier serve` as a user runs it: in a process of its own, ended by a signal."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import openai
import pytest

from limits.waits import child_process, joined
from servers.http_asking import ask
from servers.served import complete


class Serving:
    """A running command and the lines that it has written to standard error."""

    def __init__(self, child: subprocess.Popen[str]) -> None:
        self.child = child
        self.lines: list[str] = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.child.stderr:
            with self._news:
                self.lines.append(line.rstrip("\n"))
                self._news.notify_all()

    def line(self, pattern: str, nth: int = 1) -> re.Match[str]:
        """Wait for the n-th line that matches."""

        def found() -> list[re.Match[str]]:
            return [match for line in self.lines if (match := re.search(pattern, line))]

        with self._news:
            assert self._news.wait_for(lambda: len(found()) >= nth, 30), self.lines
            return found()[nth - 1]

    def end(self, number: signal.Signals) -> None:
        """Send a signal and wait for the end with exit code 0."""
        self.child.send_signal(number)
        assert self.child.wait(60) == 0, self.lines
        joined(self._reader)


@contextmanager
def serving(model, *options: str, **variables: str) -> Iterator[Serving]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MOE_")}
    command = [sys.executable, "-m", "expertier", "serve", str(model), "--port", "0", "-t", "1", "-c", "512"]
    with child_process(
        *command,
        *("--expert-cache-mib", "4", *options),
        env=environment | {"NO_COLOR": "1"} | variables,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        yield Serving(child)


@pytest.mark.usefixtures("engine")
def test_a_session(model, connect):
    with serving(model, "--metrics-port", "0", "--parallel", "2", "--allow-host", "box.lan") as command:
        url = command.line(r"serving tiny.gguf on (http://127\.0\.0\.1:\d+)")[1]
        enabled = command.line("^event=enabled .*")[0]
        assert "model=tiny.gguf" in enabled
        assert "limited_by=budget" in enabled
        client = connect(url)
        complete(client)
        complete(client)
        command.child.send_signal(signal.SIGUSR1)
        summary = command.line("^event=summary .*")[0]
        assert int(re.search(r" misses=(\d+)", summary)[1]) > 0
        metrics = command.line(r"metrics on (http://127\.0\.0\.1:\d+/metrics)")[1]
        with urllib.request.urlopen(metrics, timeout=5) as answer:
            assert b"expertier_l1_hits_total" in answer.read()
        for address, path in ((url, "/v1/models"), (metrics, "/metrics")):
            assert ask(address, path, body=None, method="GET", Host="box.lan")[0] == 200
            assert ask(address, path, body=None, method="GET", Host="evil.example")[0] == 403
        client.close()
        command.end(signal.SIGTERM)
    events = [
        line.split()[0] for line in command.lines if line.startswith("event=") and "source=" not in line
    ]
    assert events == ["event=enabled", "event=first_use", "event=summary", "event=summary"]
    last = [line for line in command.lines if line.startswith("event=summary")][-1]
    assert "turn_hits=0 turn_misses=0" in last
    assert not any("Traceback" in line for line in command.lines)


@pytest.mark.usefixtures("engine")
def test_interrupted_in_the_middle_of_a_stream(model, connect):
    with serving(model, EXPERTIER_API_KEY="secret") as command:
        url = command.line("on (http.*)")[1]
        with pytest.raises(openai.AuthenticationError):
            complete(connect(url), n=1)
        client = connect(url, "secret")
        stream = client.completions.create(model="any", prompt="on", max_tokens=480, stream=True)
        next(stream)
        command.end(signal.SIGINT)
    # The engine's own threads may still say something after it.
    assert any(line.startswith("event=summary") for line in command.lines)


@pytest.mark.usefixtures("engine")
def test_what_cannot_run_says_why(model):
    with serving(model, "--expert-cache-mib", "0.001") as command:
        assert command.child.wait(30) == 2
        command.line(
            "^event=disabled model=tiny.gguf reason=.*smallest|^event=disabled model=tiny.gguf reason="
        )
        command.line("^error: ")
