"""Helpers of the server tests."""

from __future__ import annotations

import os
import threading
import time

import openai


def complete(client: openai.OpenAI, prompt: str = "a few words", n: int = 24) -> str:
    return client.completions.create(model="any", prompt=prompt, max_tokens=n, temperature=0).choices[0].text


def tasks() -> int:
    """Threads of this process, Python's or not."""
    return len(os.listdir("/proc/self/task"))  # noqa: PTH208


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def wait_for(condition, seconds: float = 5) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def wait_until_idle(server) -> None:
    """Wait until the engine has run no graph for a while."""
    seen = -1

    def is_idle() -> bool:
        nonlocal seen
        now, seen_before = server.binding.counters().graphs, seen
        seen = now
        threading.Event().wait(0.15)
        return now == seen_before

    assert wait_for(is_idle, 20)
