"""A command with a time limit, and the line of what it said that tells what was wrong."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a command said; `failure` is None where it ended well."""

    failure: str | None
    status: int
    output: str
    is_late: bool
    seconds: float


def run_command(command: Sequence[str], environment: Mapping[str, str], limit_s: float) -> Outcome:
    """Run it; after the limit it ends, with all processes that it has started."""
    start = time.monotonic()
    child = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    is_late = False
    output = ""
    try:
        output, _ = child.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        is_late = True
    finally:
        end_all(child)
    seconds = time.monotonic() - start
    if is_late:
        return Outcome(f"nothing within {limit_s:g} s", -1, output, True, seconds)
    return Outcome(reason(output) if child.returncode else None, child.returncode, output, False, seconds)


def end_all(child: subprocess.Popen[str]) -> None:
    """End a process that began a session, and what it has started there."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    if child.poll() is None:
        child.communicate(timeout=60)


def reason(output: str) -> str:
    """Return the line that says what was wrong."""
    if "Timeout (" in output:
        return "a wait for ever"
    lines = output.splitlines()
    of_pytest = [line[1:].strip() for line in lines if line.startswith("E  ")]
    if of_pytest[:1] == ["AssertionError"]:  # of a test that runs in a process of its own
        of_pytest = [line.strip() for line in lines if line.startswith("    assert ")][-1:] or of_pytest
    errors = [line.strip(" |") for line in lines if "Error: " in line and "File " not in line]
    return (of_pytest or errors or [line for line in lines if line.strip()] or ["failed"])[0]
