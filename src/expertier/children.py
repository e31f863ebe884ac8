"""Programs that we start and wait for; each ends at the latest when the code that waits for it ends, for any reason.

Each program is the head of a process group of its own, so that the programs that it starts in turn (as a compiler
starts its passes) end with it. A signal from a terminal does not reach that group: our process gets it, and ends the
program.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from expertier.interrupts import interrupts_deferred, raise_terminated

_TERM_S = 5.0
"""How long a program may take to end by itself after SIGTERM."""

_KILL_S = 10.0
"""How long the kernel may take to end a program after SIGKILL."""

_LOOK_S = 0.02


class Children:
    """The programs that one piece of work runs, on any thread, until the `with` block ends or `end` is called."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._ended = False

    def run(
        self,
        command: Sequence[str],
        *,
        stdin: str = "",
        merges_errors: bool = False,
        environ: Mapping[str, str] | None = None,
        folder: Path | None = None,
        timeout_s: float | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program, in `folder`, to its end and return its output.

        With `merges_errors`, its errors are in `stdout` as well.

        Raises:
            OSError: the program cannot be started. subprocess.TimeoutExpired: it took longer than `timeout_s`.
        """
        started: list[subprocess.Popen[str]] = []
        try:
            with interrupts_deferred():
                started.append(self._start(command, merges_errors, environ, folder))
            out, err = started[0].communicate(stdin, timeout_s)
            return subprocess.CompletedProcess(command, started[0].returncode, out, err)
        finally:
            with interrupts_deferred():
                while started:  # popped, so that each `__del__` runs here, where it loses no interrupt
                    self._finish(started.pop())

    def end(self) -> None:
        """End the running programs, and start no more; called by the thread that waits for the other threads."""
        with interrupts_deferred():
            with self._lock:
                self._ended = True
                running = list(self._running)
            for child in running:
                _end_group(child)

    def _start(
        self,
        command: Sequence[str],
        merges_errors: bool,
        environ: Mapping[str, str] | None,
        folder: Path | None,
    ) -> subprocess.Popen[str]:
        with self._lock:
            if self._ended:
                raise InterruptedError(f"{command[0]} was not started: the work that it is part of has ended")
            child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT if merges_errors else subprocess.PIPE,
                text=True,
                errors="replace",
                env=None if environ is None else dict(environ),
                cwd=folder,
                process_group=0,
            )
            self._running.add(child)
            return child

    def _finish(self, child: subprocess.Popen[str]) -> None:
        """End a program that still runs, and close our ends of its pipes."""
        with self._lock:
            self._running.discard(child)
        if child.returncode is None:
            _end_group(child)
            with suppress(subprocess.TimeoutExpired):
                child.wait(_KILL_S)
        for pipe in (child.stdin, child.stdout, child.stderr):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()


def run_child(
    command: Sequence[str], *, merges_errors: bool = False, timeout_s: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Run one program to its end, as `Children.run` does; an exception that ends this call ends the program too."""
    return Children().run(command, merges_errors=merges_errors, timeout_s=timeout_s)


def run_as_child(main: Callable[[], int]) -> int:
    """Return what `main` returns, in a program that `Children` starts; on SIGTERM the program cleans up and ends."""
    signal.signal(signal.SIGTERM, raise_terminated)
    try:
        return main()
    except KeyboardInterrupt:
        return 128 + signal.SIGTERM


def _end_group(child: subprocess.Popen[str]) -> None:
    """End a program and all programs that it has started; its own thread still has to wait for it.

    Until that thread has waited, no other group can get the program's number.
    """
    _signal_group(child, signal.SIGTERM)
    deadline = time.monotonic() + _TERM_S
    while time.monotonic() < deadline and not _has_ended(child):
        time.sleep(_LOOK_S)
    _signal_group(child, signal.SIGKILL)


def _has_ended(child: subprocess.Popen[str]) -> bool:
    try:
        return os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
    except ChildProcessError:  # its own thread has waited for it already
        return True


def _signal_group(child: subprocess.Popen[str], number: signal.Signals) -> None:
    if child.returncode is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, number)
