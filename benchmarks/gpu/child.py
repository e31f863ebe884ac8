"""Runs one measurement in a process of its own: a crash or a hang costs that measurement alone.

The process prints its findings as lines `RESULT {...}`, each of which replaces the line before, so that the findings of
a process that dies are not lost.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from expertier.errors import ExpertierError

_MARK = "RESULT "
_LAST_WORDS = 3000  # characters
_END_S = 20  # to end after it was told to


def tell(findings: dict[str, Any]) -> None:
    """Print findings, in the child."""
    print(_MARK + json.dumps(findings), flush=True)


def answer(measure: Callable[[dict[str, Any]], None]) -> int:
    """Run `measure` with the options that the first argument holds, in the child; returns the status to exit with."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # else each step would set handlers, which takes some 10 us
    try:
        measure(json.loads(sys.argv[1]))
    except ExpertierError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0


def run_child(script: Path, options: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
    """Run `script` with `options` as JSON; returns its last findings, with `failed` where it did not end well."""
    start = time.perf_counter()
    with (
        tempfile.TemporaryFile("w+", errors="replace") as out,
        tempfile.TemporaryFile("w+", errors="replace") as err,
    ):
        child = subprocess.Popen(
            [sys.executable, str(script), json.dumps(options)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(script.parents[1]), *_python_path()])},
        )
        failed = _wait(child, timeout_s)
        out.seek(0)
        err.seek(0)
        lines = [line for line in out.read().splitlines() if line.startswith(_MARK)]
        words = err.read().strip()[-_LAST_WORDS:]
    findings: dict[str, Any] = json.loads(lines[-1].removeprefix(_MARK)) if lines else {}
    findings["wall_s"] = time.perf_counter() - start
    if failed:
        findings["failed"] = f"{failed}: {words}" if words else failed
    return findings


def _python_path() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def _wait(child: subprocess.Popen[bytes], timeout_s: float) -> str:
    """Wait for the child; return what went wrong, or an empty string."""
    try:
        status = child.wait(timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        try:
            child.wait(_END_S)
        except subprocess.TimeoutExpired:  # stuck in the driver: leave it
            return f"still running after {timeout_s:.0f} s, and does not end when killed"
        return f"killed after {timeout_s:.0f} s"
    except BaseException:
        os.killpg(child.pid, signal.SIGKILL)
        raise
    if status < 0:
        return f"ended by signal {signal.Signals(-status).name}"
    return f"ended with status {status}" if status else ""
