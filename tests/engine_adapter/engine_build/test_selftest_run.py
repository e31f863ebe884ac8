from __future__ import annotations

from pathlib import Path

import pytest

from expertier.engine_adapter.build import selftest_run
from expertier.engine_adapter.build.engine import Engine
from expertier.engine_adapter.build.selftest_run import SelftestReport, run_selftest
from expertier.errors import EngineMismatchError

PROXY, HOST = Path("/toy/proxy.so"), Path("/toy/host.so")
GOOD = """
import json, sys
print("engine: some log line {not json")
print(json.dumps({"ok": True, "ggml_version": "0.26.0", "api_version": 3, "devices": sys.argv[1:],
                  "defaults": {"model": {"n": 1}, "context": {}}}))
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a module that a child process can run as `toy_selftest`."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))
    path = tmp_path / "modules" / "toy_selftest.py"
    path.parent.mkdir()
    return path


def run(engine: Engine) -> SelftestReport:
    return run_selftest(engine, PROXY, HOST, module="toy_selftest")


def test_a_good_child_gives_a_report(module: Path, toy_engine: Engine) -> None:
    module.write_text(GOOD)
    report = run(toy_engine)
    assert report.ggml_version == "0.26.0"
    assert report.api_version == 3
    assert report.defaults == {"model": {"n": 1}, "context": {}}
    libraries = tuple(map(str, toy_engine.libraries))
    assert report.devices == ("--proxy", str(PROXY), "--host", str(HOST), *libraries)


def test_devices_may_be_left_out(module: Path, toy_engine: Engine) -> None:
    module.write_text('print(\'{"ok": true, "ggml_version": "1", "api_version": 3, "defaults": {}}\')')
    assert run(toy_engine).devices is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "crashed with SIGSEGV"),
        ("import os; print('{\"ok\": true}', flush=True); os.abort()", "crashed with SIGABRT"),
        ('import sys; print(\'{"ok": false, "error": "wrong by 3"}\'); sys.exit(1)', "failed: wrong by 3"),
        ('print(\'{"ok": false, "error": "wrong by 3"}\')', "failed: wrong by 3"),
        ("import sys; sys.exit('cannot load: undefined symbol')", "(?s)failed: status 1.*undefined symbol"),
        ("print('nothing to say')", "failed: status 0"),
        ('print(\'{"ok": true, "ggml_version": "1"}\')', "unreadable.*api_version"),
        ('print(\'{"ok": true, "ggml_version": 1, "api_version": 3, "defaults": 4}\')', "unreadable"),
    ],
)
def test_anything_else_refuses(module: Path, toy_engine: Engine, text: str, reason: str) -> None:
    module.write_text(text)
    with pytest.raises(EngineMismatchError, match=reason) as caught:
        run(toy_engine)
    assert "refused and not kept" in str(caught.value)
    assert "--llama-cpp DIR" in str(caught.value)


def test_a_child_that_hangs_is_ended(
    module: Path, toy_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selftest_run, "_TIMEOUT_S", 0.3)
    module.write_text("import threading; threading.Event().wait()")
    with pytest.raises(EngineMismatchError, match=r"did not end within 0\.3 s"):
        run(toy_engine)
