"""Programs that we start: ended with whoever waits for them, whatever ends that, and with all that they started."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from expertier import children
from expertier.children import Children, run_child
from interruptions.interrupt_at import at_every_instruction, expertier_folders, n_instructions

HERE = expertier_folders()
LIMIT_S = 30
TREE = "sleep 62 & echo started; wait"
STUBBORN = """
import signal, subprocess
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen(["sleep", "62"])
print("started", flush=True)
signal.pause()
"""


@pytest.fixture(autouse=True)
def default_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def running() -> list[psutil.Process]:
    """What this process has started and what `sleep`s of the tests run."""
    found = []
    for process in psutil.process_iter(["cmdline", "status", "ppid"]):
        if process.info["status"] != psutil.STATUS_ZOMBIE and process.info["cmdline"] == ["sleep", "62"]:
            found.append(process)
    return found


def must_have_ended() -> None:
    """Assert that they are gone; the kernel may take a moment to end what was killed."""
    deadline = time.monotonic() + LIMIT_S
    while running():
        assert time.monotonic() < deadline, running()
    assert psutil.Process().children() == []


def test_what_it_said() -> None:
    ended = run_child(["sh", "-c", "echo out; echo error >&2; exit 3"])
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "out\n", "error\n")
    assert run_child(["sh", "-c", "echo error >&2"], merges_errors=True).stdout == "error\n"
    assert Children().run(["cat"], stdin="text").stdout == "text"
    with pytest.raises(FileNotFoundError):
        run_child(["no-such-program"])


def test_a_program_that_takes_too_long_is_ended() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        run_child(["sh", "-c", TREE], timeout_s=0.2)
    must_have_ended()


def test_one_that_does_not_end_when_told_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "_TERM_S", 0.2)
    with pytest.raises(subprocess.TimeoutExpired):
        run_child([sys.executable, "-c", STUBBORN], timeout_s=1.5)
    must_have_ended()


def test_those_of_other_threads_are_ended_and_no_other_begins() -> None:
    group = Children()
    ended: list[int] = []
    thread = threading.Thread(
        target=lambda: ended.append(group.run(["sh", "-c", TREE]).returncode), daemon=True
    )
    thread.start()
    deadline = time.monotonic() + LIMIT_S
    while not running():
        assert time.monotonic() < deadline
    group.end()
    thread.join(LIMIT_S)
    assert ended == [-signal.SIGTERM]
    must_have_ended()
    with pytest.raises(InterruptedError):
        group.run(["true"])


def test_an_interrupt_ends_it_with_all_that_it_started() -> None:
    with pytest.raises(KeyboardInterrupt):
        run_child(["sh", "-c", f"kill -INT $PPID; {TREE}"])
    must_have_ended()


@pytest.mark.parametrize("step", [9, pytest.param(1, marks=pytest.mark.deep)], ids=["sample", "all"])
def test_an_interrupt_at_any_instruction(step: int) -> None:
    """Also between a program's start and whoever would end it."""

    def run() -> None:
        run_child(["true"])

    run()
    n = n_instructions(run, HERE)
    n_done = 0
    for found in at_every_instruction(run, HERE, at=range(1, n, step)):
        assert isinstance(found.error, KeyboardInterrupt), found
        assert psutil.Process().children() == [], found.place
        n_done += 1
    assert n_done > n / step * 0.8, (n_done, n)
    print(f"interrupted at {n_done} of {n} instructions")
