"""Commands that get a signal while they run, at a moment that they tell by what they print."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Self

import psutil

LIMIT_S = 60
_MAIN = "import sys\nfrom expertier.__main__ import main\nsys.argv[0] = 'expertier'\nmain()"


class Signalled:
    """`expertier ARGUMENTS` with a temporary folder of its own; `code` runs first, in the same process."""

    def __init__(
        self, temporary: Path, *arguments: object, code: str = "", environ: dict[str, str] | None = None
    ) -> None:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("MOE_")}
        self.temporary = temporary
        self._child = subprocess.Popen(
            [sys.executable, "-c", f"{code}\n{_MAIN}", *map(str, arguments)],
            env={**inherited, "NO_COLOR": "1", "TMPDIR": str(temporary), **(environ or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._watchdog = threading.Timer(LIMIT_S, self._child.kill)
        self._watchdog.start()
        self.said = ""
        self.status = 0
        self._started: list[psutil.Process] = []

    def wait_for(self, words: str, n_more: int = 0) -> Self:
        """Wait until it has printed `words`, and `n_more` characters after them."""
        assert self._child.stdout is not None
        while words not in self.said or len(self.said.split(words, 1)[1]) < n_more:
            character = self._child.stdout.read(1)
            assert character, f"it ended without {words!r}: {self.said}"
            self.said += character
        return self

    def wait_for_child(self, is_it: Callable[[psutil.Process], bool]) -> Self:
        """Wait until a process that it has started is the one."""
        process = psutil.Process(self._child.pid)
        while not any(map(is_it, process.children(recursive=True))):
            assert self._child.poll() is None, "it ended before"
        return self

    def send(self, number: signal.Signals) -> Self:
        """Send the signal, and wait for the end."""
        self._started = psutil.Process(self._child.pid).children(recursive=True)
        self._child.send_signal(number)
        return self.wait()  # no limit: the watchdog has one

    def wait(self) -> Self:
        """Wait for the end."""
        assert self._child.stdout is not None
        with self._child.stdout as out:
            self.said += out.read()  # the watchdog ends this
        self.status = self._child.wait(LIMIT_S)
        self._watchdog.cancel()
        return self

    def must_have_ended_by(self, number: signal.Signals) -> None:
        """Assert its status, one line and no traceback, and that neither a process nor a folder of it is left."""
        assert self.status == 128 + number, self.said
        assert self.said.splitlines()[-1] == f"expertier: ended by {number.name}", self.said
        for sign in ("Traceback", "error:", "Exception ignored", "Aborted"):
            assert sign not in self.said, self.said
        assert [process for process in self._started if _runs(process)] == []
        assert list(self.temporary.iterdir()) == []


def _runs(process: psutil.Process) -> bool:
    """Whether a process runs still; one that was killed may wait for its new parent to look."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
