"""Helpers of the server tests."""

from __future__ import annotations

import os
import time

import openai

from limits.waits import wait_until


def complete(client: openai.OpenAI, prompt: str = "a few words", n: int = 24) -> str:
    return client.completions.create(model="any", prompt=prompt, max_tokens=n, temperature=0).choices[0].text


def tasks() -> int:
    """Threads of this process, Python's or not."""
    return len(os.listdir("/proc/self/task"))  # noqa: PTH208


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def wait_until_idle(server) -> None:
    """Wait until the engine has run no graph for a while."""
    seen = -1

    def is_idle() -> bool:
        nonlocal seen
        now, seen_before = server.binding.counters().graphs, seen
        seen = now
        time.sleep(0.15)  # a pause: an engine that is late costs a look at the tiers while they are used
        return now == seen_before

    wait_until(is_idle, "the engine goes on")
