"""SIGINT and SIGTERM end every command in the same way: one line, status 130 or 143, and nothing left behind."""

from __future__ import annotations

import os
import signal
import stat
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest

from expertier.planner.traces.file import read_trace
from interruptions.signalled import Signalled

BOTH = [
    pytest.param(signal.SIGTERM, id="SIGTERM"),
    pytest.param(signal.SIGINT, id="SIGINT", marks=pytest.mark.deep),
]
TINY_DEMO = """
import functools, expertier.cli.app as cli
from expertier.engine_adapter.models.synth import TINY_SHAPE
cli.run_demo = functools.partial(cli.run_demo, shape=TINY_SHAPE)
"""

Start = Callable[..., Signalled]


@pytest.fixture
def start(ready_cache: str, tmp_path: Path) -> Start:
    """Start `expertier ARGUMENTS` with the cache folder that has the plugin."""

    def start(*arguments: object, code: str = "", **environ: str) -> Signalled:
        temporary = tmp_path / "temporary"
        temporary.mkdir()
        return Signalled(
            temporary, *arguments, code=code, environ={"EXPERTIER_CACHE_DIR": ready_cache, **environ}
        )

    return start


def is_measured_run(process: psutil.Process) -> bool:
    try:
        return any("measured_run" in word for word in process.cmdline())
    except psutil.Error:
        return False


@pytest.mark.parametrize("number", BOTH)
def test_the_demonstration_ends_its_run(start: Start, number: signal.Signals) -> None:
    command = start("demo", code=TINY_DEMO).wait_for("tokens: stock").wait_for_child(is_measured_run)
    command.send(number).must_have_ended_by(number)


@pytest.mark.parametrize("number", BOTH)
def test_a_recording_is_saved(start: Start, tiny: Path, tmp_path: Path, number: signal.Signals) -> None:
    """What is recorded by then is written; the engine's log of events is no part of the one line."""
    recording = tmp_path / "routing.npz"
    command = start(
        "run",
        tiny,
        "-p",
        "a text",
        "-n",
        "400",
        "-c",
        "512",
        "--expert-cache-mib",
        "4",
        "--record-routing",
        recording,
    ).wait_for(f"event=first_use model={tiny.name}", n_more=9)  # some tokens
    command.send(number).must_have_ended_by(number)
    assert read_trace(recording).n_calls > 0
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_during_imports(start: Start, number: signal.Signals) -> None:
    """Also where what is imported would swallow an exception."""
    slow = """
import sys, time
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            print("importing", flush=True)
            try:
                time.sleep(60)
            except BaseException:
                print("swallowed", flush=True)
sys.meta_path.insert(0, Slow())
"""
    start("--version", code=slow).wait_for("importing\n").send(number).must_have_ended_by(number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_at_exit(start: Start, number: signal.Signals) -> None:
    slow = """
import atexit, time
def last():
    print("ending", flush=True)
    time.sleep(60)
atexit.register(last)
"""
    start("--version", code=slow).wait_for("ending\n").send(number).must_have_ended_by(number)


def test_a_signal_that_is_ignored_stays_so(start: Start) -> None:
    """As of what runs on behind a shell that has ended."""
    code = """
import os, signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
os.kill(os.getpid(), signal.SIGINT)
"""
    command = start("--version", code=code).wait()  # no limit: its watchdog
    assert command.status == 0, command.said


@pytest.fixture
def slow_compiler(tmp_path: Path) -> Path:
    """A compiler that says what it is, compiles nothing, and takes long, in a process that it starts."""
    compiler = tmp_path / "slow-c++"
    compiler.write_text(
        '#!/bin/sh\ncase "$*" in *--version*) echo slow 1.0;; *-fsyntax-only*) cat > /dev/null;; '
        "*) sleep 61 & wait;; esac\n"
    )
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    return compiler


def is_sleep(process: psutil.Process) -> bool:
    try:
        return process.cmdline() == ["sleep", "61"]
    except psutil.Error:
        return False


@pytest.mark.parametrize("number", BOTH)
def test_a_build_ends_its_compilers(
    start: Start, ready_cache: str, slow_compiler: Path, number: signal.Signals
) -> None:
    command = start("engine", "build", CXX=str(slow_compiler)).wait_for("compiling").wait_for_child(is_sleep)
    command.send(number).must_have_ended_by(number)
    assert list((Path(ready_cache) / "plugins").glob(".new-*")) == []


def read_ids(folder: Path) -> Path:
    """Recorded routing that takes a while to write a model for, or to play."""
    random = np.random.default_rng(5)
    ids = np.array([[random.permutation(64)[:8] for _ in range(12)] for _ in range(200)], np.int32)
    path = folder / "routing.npy"
    np.save(path, ids)
    return path


@pytest.mark.deep
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
@pytest.mark.parametrize(
    "arguments",
    [
        ("synth", "--trace", "{ids}", "-o", "{out}", "--n-ff", "512"),
        ("replay", "{ids}", "--slots", "16"),
        ("profile", "make", "{ids}", "-o", "{out}"),
        ("plan", "{tiny}", "--plot", "{out}.png"),
        ("probe", "--again"),
        ("engine", "build", "--rebuild"),
        ("exec", "--", "llama-cli", "-m", "{tiny}"),
        ("serve", "{tiny}", "--port", "0", "--expert-cache-mib", "4"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_any_command_at_any_time(
    ready_cache: str, tiny: Path, tmp_path: Path, arguments: tuple[str, ...], number: signal.Signals
) -> None:
    """It has ended by then, or ends by the signal; its output is whole or not there."""
    names = {"ids": read_ids(tmp_path), "out": tmp_path / "out", "tiny": tiny}
    at_s = [0.3 * 1.6**step for step in range(7)]
    for after_s in at_s:
        temporary = tmp_path / f"at-{after_s:.2f}"
        temporary.mkdir()
        command = Signalled(
            temporary,
            *(word.format(**names) for word in arguments),
            environ={"EXPERTIER_CACHE_DIR": ready_cache},
        )
        time.sleep(after_s)  # a pause: the moments are chosen by time
        command.send(number)
        if command.status not in (0, 2, -number):  # ended; refused what it cannot do here; or had not begun
            command.must_have_ended_by(number)
        assert "Traceback" not in command.said
        assert list(temporary.iterdir()) == []
        assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]
    assert not list(Path(ready_cache).glob("*/.new-*"))
    assert not list(Path(ready_cache).glob("*/.sample-*"))


def test_work_folders_of_killed_processes_are_removed(tmp_path: Path) -> None:
    """Those that are old and not locked; of others nothing is touched."""
    from expertier.work_folder import work_folder

    def make(name: str, *, age_s: float = 7200) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "model.gguf").write_bytes(b"x")
        os.utime(folder, (time.time() - age_s,) * 2)
        return folder

    killed, fresh, theirs = (
        make("expertier-demo-123-abcdefgh"),
        make("expertier-demo-124-abcdefgh", age_s=60),
        make("expertier-demo-mymodels"),
    )
    with work_folder("expertier-demo-", tmp_path, is_shared=True) as running:
        os.utime(running, (time.time() - 7200,) * 2)
        with work_folder("expertier-demo-", tmp_path, is_shared=True) as second:
            assert {path.name for path in tmp_path.iterdir()} == {
                running.name, second.name, fresh.name, theirs.name,
            }  # fmt: skip
    assert not killed.exists()
    assert {path.name for path in tmp_path.iterdir()} == {fresh.name, theirs.name}
    with work_folder("expertier-demo-", tmp_path):  # a folder of ours alone: older releases' names count, too
        assert not theirs.exists()
