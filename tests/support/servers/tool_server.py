"""A llama-server of a llama.cpp folder, as stock or through `expertier exec`, and what it says and logs."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from engine_runs.tiered_runs import SMALL

PATIENCE_S = 120
EXEC = (sys.executable, "-m", "expertier", "exec", "--")
HALF_BUDGET = {"MOE_EXPERT_CACHE_MIB": f"{SMALL.expert_bytes_total / 2**20 / 2:.3f}"}
PROMPTS = ("some words to go on from", "another text that is a good deal longer than the first")


def events_of(said: str, event: str) -> list[dict[str, str]]:
    """Return the fields of each line of ours with this event, in a text of all that a tool said."""
    found = [line[line.index("event=") :] for line in said.splitlines() if f"event={event} " in line]
    return [dict(part.split("=", 1) for part in shlex.split(line)) for line in found]


class ToolServer:
    """A llama-server on a free port of the loopback, from where it answers to the block's end."""

    def __init__(self, *command: object, env: dict[str, str] | None = None) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed at the block's end
        arguments = [*map(str, command), "--host", "127.0.0.1", "--port", str(port), "-t", "1", "-c", "512"]
        self.process = subprocess.Popen(
            arguments, env={**os.environ, **(env or {})}, stdout=self._said, stderr=self._said, text=True
        )
        self.said = ""

    def __enter__(self) -> Self:
        try:
            self.wait_until(self._is_up)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.end(signal.SIGINT)

    def end(self, number: signal.Signals) -> None:
        """Send a signal unless the server has ended, and wait for the end; `said` then has everything."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            self.process.wait(60)
        finally:
            self.process.kill()
            if not self._said.closed:
                self.said = self.read()
                self._said.close()

    def read(self) -> str:
        """Return what the server has said up to now."""
        return Path(f"/proc/self/fd/{self._said.fileno()}").read_text(errors="replace")

    def wait_until(self, happened: Callable[[], bool]) -> None:
        """Look again and again: there is nothing to wait on."""
        deadline = time.monotonic() + PATIENCE_S
        while not happened():
            assert self.process.poll() is None, f"the server ended: {self.read()}"
            assert time.monotonic() < deadline, f"it did not happen: {self.read()}"
            time.sleep(0.05)  # a pause: between two looks

    def answer(self, prompt: str, n_tokens: int = 32) -> dict[str, Any]:
        """Return the answer to a prompt without randomness, or the error that came instead."""
        body = {"prompt": prompt, "n_predict": n_tokens, "temperature": 0, "cache_prompt": False}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}/completion", json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as reply:
                return dict(json.load(reply))
        except urllib.error.HTTPError as error:
            return dict(json.load(error))

    def complete(self, prompt: str, n_tokens: int = 32) -> str:
        """Return what a prompt is continued with."""
        return str(self.answer(prompt, n_tokens)["content"])

    def _is_up(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return True
        except OSError:
            return False


def answers(*command: object, env: dict[str, str] | None = None) -> tuple[list[str], ToolServer]:
    """Start a server, return its continuations of PROMPTS, and the server after its end."""
    with ToolServer(*command, env=env) as server:
        found = [server.complete(prompt) for prompt in PROMPTS]
    assert server.process.returncode == 0, server.said
    return found, server
