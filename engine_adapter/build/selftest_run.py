"""Runs the self-test of fresh libraries in a child process, so that a crash does not end our process.

The child is `python -m expertier.engine_adapter.llama_cpp.selftest --proxy PROXY --host HOST LIBRARY...`, the engine's
libraries in the order of loading. It exits with 0 and prints one line of JSON:
{"ok": true, "ggml_version": "0.26.0", "api_version": 3, "defaults": {"model": {...}, "context": {...}},
"devices": ["CPU", ...]}; or with another status and {"ok": false, "error": "..."}.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expertier.children import run_child
from expertier.engine_adapter.build.defaults import Defaults
from expertier.engine_adapter.build.engine import Engine
from expertier.errors import EngineMismatchError

MODULE = "expertier.engine_adapter.llama_cpp.selftest"
_TIMEOUT_S = 300
_LAST_LINES = 10


@dataclass(frozen=True, slots=True)
class SelftestReport:
    """What the child process found in the engine, with the libraries in use."""

    ggml_version: str
    api_version: int
    defaults: Defaults
    devices: tuple[str, ...] | None


def run_selftest(engine: Engine, proxy: Path, host: Path, module: str = MODULE) -> SelftestReport:
    """Run the self-test and return its report.

    Errors: EngineMismatchError, when the child crashes, hangs, finds a wrong value or prints no readable report.
    """
    command = [sys.executable, "-m", module, "--proxy", str(proxy), "--host", str(host)]
    command += map(str, engine.libraries)
    try:
        child = run_child(command, timeout_s=_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise _refused(engine, f"did not end within {_TIMEOUT_S} s") from error
    said = _last_json(child.stdout)
    if child.returncode < 0:
        raise _refused(engine, f"crashed with {_signal_name(-child.returncode)}", child.stderr)
    if child.returncode != 0 or said is None or said.get("ok") is not True:
        reason = said.get("error") if said else None
        raise _refused(engine, f"failed: {reason or f'status {child.returncode}'}", child.stderr)
    try:
        devices = said.get("devices")
        return SelftestReport(
            ggml_version=str(said["ggml_version"]),
            api_version=int(said["api_version"]),
            defaults={name: dict(fields) for name, fields in said["defaults"].items()},
            devices=None if devices is None else tuple(str(device) for device in devices),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _refused(engine, f"reported something unreadable ({error!r})", child.stdout) from error


def _last_json(text: str) -> dict[str, Any] | None:
    """Return the last line that is a JSON object; the engine may print anything before it."""
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            try:
                value = json.loads(line)
            except ValueError:
                continue
            if isinstance(value, dict):
                return value
    return None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _refused(engine: Engine, what: str, said: str = "") -> EngineMismatchError:
    last = "\n".join(said.strip().splitlines()[-_LAST_LINES:])
    return EngineMismatchError(
        f"the plugin built for {engine} was refused and not kept: its self-test {what}. The engine's library "
        f"and the headers do not fit together, or this machine cannot run it{': ' if last else ''}{last}\n"
        f"{engine.remedy}"
    )
