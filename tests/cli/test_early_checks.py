"""A command refuses what it can before it looks for an engine."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys

import pytest

from expertier.cli import app as cli
from expertier.cli import serve_command
from servers.commands import command


@pytest.fixture(autouse=True)
def _no_engine(monkeypatch):
    """Fail a test here that opens an engine."""

    def opened(*_arguments: object, **_named: object) -> None:
        raise AssertionError("an engine was opened")

    for module in (cli, serve_command):
        monkeypatch.setattr(module, "open_engine", opened)


@pytest.mark.parametrize("name", ["run", "serve", "probe"])
def test_more_threads_than_processors(tiny, name):
    n = len(os.sched_getaffinity(0)) + 1
    arguments = {"run": (tiny, "-p", "x"), "serve": (tiny, "--port", 0), "probe": ()}[name]
    command(name, *arguments, "-t", n).must_refuse(f"--threads {n}", f"{n - 1} processors", "or 0")


def test_a_context_too_short_for_what_is_asked_for(tiny):
    command("run", tiny, "-p", "x", "-n", 64, "--ctx", 64).must_refuse("--ctx 64 is too small", "64 new ones")


def test_a_prompt_that_is_no_text(tiny):
    command("run", tiny, "-p", os.fsdecode(b"some \xff")).must_refuse("--prompt", "UTF-8", "character 6")


def test_a_server_without_its_package(tiny, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "prometheus_client" else real(name, *a)
    )
    command("serve", tiny, "--port", 0, "--metrics-port", 0).must_refuse("prometheus-client", "pip install")


def test_ports_that_cannot_be_had(tiny):
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        command("serve", tiny, "--port", taken).must_refuse(f"port {taken}", "--port", "0: a free one")
        command("serve", tiny, "--port", 0, "--metrics-port", taken).must_refuse(
            f"port {taken}", "--metrics-port"
        )
    command("serve", tiny, "--port", 8089, "--metrics-port", 8089).must_refuse(
        "both 8089", "0 for a free one"
    )
    command("serve", tiny, "--host", "256.0.0.1", "--port", 0).must_refuse("256.0.0.1", "--host")


@pytest.mark.parametrize(
    "n_imports",
    [1, 40, *(pytest.param(n, marks=pytest.mark.deep) for n in (2, 10, 100, 300, 1000, 2000, 3000, 4000))],
)
def test_an_interrupt_while_it_imports(tmp_path, n_imports):
    """Ctrl-C comes at the n-th import of the command line."""
    code = f"""
import builtins, os, signal, sys
real, n = builtins.__import__, 0
def counted(name, *arguments, **named):
    global n
    n += n > 0 or name == "expertier.cli.app"
    if n == {n_imports}:
        os.kill(os.getpid(), signal.SIGINT)
    return real(name, *arguments, **named)
builtins.__import__ = counted
sys.argv[:] = ["expertier", "--version"]
from expertier.__main__ import main
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "expertier: ended by SIGINT\n")
    assert not list(tmp_path.iterdir())
