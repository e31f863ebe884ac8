"""Signals in a process whose main thread is in C all the time, as a tool's is."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from contextlib import AbstractContextManager

from limits.waits import child_process

PROGRAM = """
    import ctypes, os, signal, sys
    from expertier.engine_adapter.telemetry.signals import answer_signal

    libc = ctypes.CDLL(None, use_errno=True)
    answers = iter(range(100))

    def answer():
        number = next(answers)
        print("answer", number, flush=True)
        if number == 1:
            raise ValueError("of the action's")

    print("taken", answer_signal(signal.SIGUSR1, answer), flush=True)
    print("read", libc.read(0, ctypes.create_string_buffer(1), ctypes.c_size_t(1)), flush=True)
"""


def start(preparation: str = "") -> AbstractContextManager[subprocess.Popen[str]]:
    return child_process(
        *(sys.executable, "-c", preparation + textwrap.dedent(PROGRAM)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_signals_are_answered_while_the_main_thread_is_in_c():
    """The call that they interrupt goes on, and an error of the answer is not the last of them."""
    with start() as process:
        assert process.stdout.readline() == "taken True\n"
        for number in range(4):
            process.send_signal(signal.SIGUSR1)
            assert process.stdout.readline() == f"answer {number}\n"
        process.stdin.close()
        assert process.stdout.read() == "read 0\n"  # the end of the input, and not -1
        assert "of the action's" in process.stderr.read()
        assert process.wait(30) == 0


def test_a_signal_that_the_program_ignores_stays_its_own():
    with start("import signal; signal.signal(signal.SIGUSR1, signal.SIG_IGN)\n") as process:
        assert process.stdout.readline() == "taken False\n"
        process.send_signal(signal.SIGUSR1)
        process.stdin.close()
        assert process.stdout.read() == "read 0\n"
        assert "taken by the program itself" in process.stderr.read()
        assert process.wait(30) == 0
