"""Commands in children of a process that has imported them already: an import takes longer than most commands.

Run as a program, this is that process: a line of JSON on its standard input for each command, a line with its exit
status on its standard output. Everything else is as in a process of its own: the environment, the folder, the standard
streams, and how it ends.
"""

from __future__ import annotations

import io
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stderr, suppress
from pathlib import Path
from typing import Any

from limits.waits import child_process

LIMIT_S = 300
_PRELOADED = (
    "expertier.cli.app",
    "expertier.engine_adapter.tiered_model",
    "expertier.engine_adapter.hosts.measured_run",
)


class WarmCommands:
    """The process, seen from outside."""

    def __init__(self, ending: ExitStack, environment: dict[str, str]) -> None:
        """Start it; it ends with `ending`."""
        self._process = ending.enter_context(
            child_process(
                *(sys.executable, "-m", "servers.warm_commands"),
                limit_s=24 * 3600,
                env={**environment, "PYTHONPATH": str(Path(__file__).parents[1])},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )

    def run(
        self, arguments: Sequence[str], environment: dict[str, str], code: str = ""
    ) -> tuple[int, str, str]:
        """Run `expertier ARGUMENTS`, after some Python in the same process; return its status, output and errors."""
        with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
            request = {
                "arguments": arguments,
                "environment": environment,
                "folder": str(Path.cwd()),
                "code": code,
                "out": out.name,
                "err": err.name,
            }
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            print(json.dumps(request), file=self._process.stdin, flush=True)
            status = int(self._process.stdout.readline())
            return status, out.read(), err.read()


def _serve() -> dict[str, Any]:
    """Answer requests; returns one in the child that is to do it, and does not return elsewhere."""
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        child = os.fork()
        if not child:
            return request
        with os.fdopen(os.pidfd_open(child)) as ended:
            if not select.select([ended], [], [], LIMIT_S)[0]:
                os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)  # no limit: it has ended
        print(os.waitstatus_to_exitcode(status), flush=True)
    sys.exit()


def _become(request: dict[str, Any]) -> None:
    """Be the process that the request wants."""
    for number, name in ((0, os.devnull), (1, request["out"]), (2, request["err"])):
        opened = os.open(name, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_APPEND)
        os.dup2(opened, number)
        os.close(opened)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.argv = ["expertier", *request["arguments"]]
    exec(request["code"], {})


def _warm_up() -> None:
    """Import what commands need, and what their options do."""
    for module in _PRELOADED:
        __import__(module)
    sys.argv = ["expertier", "inspect", "nowhere.gguf"]
    with redirect_stderr(io.StringIO()), suppress(SystemExit):
        sys.modules["expertier.cli.app"].main()


if __name__ == "__main__":
    _warm_up()
    _become(_serve())
    sys.modules["expertier.cli.app"].main()
