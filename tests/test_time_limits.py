"""A test that waits for ever fails and says where, in Python and in C, and the process ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parent / "support"
RUN = f"""
import sys
sys.path.insert(0, {str(SUPPORT)!r})
import pytest
from limits import time_limits
time_limits.GRACE_S = float(sys.argv[2])
time_limits.END_S = 1
options = ["-q", "-c", "/dev/null", "-p", "no:cacheprovider", "-o", "timeout=1", "-o", "timeout_method=signal"]
sys.exit(pytest.main([*options, sys.argv[1]], plugins=[time_limits]))
"""
IN_PYTHON = """
import threading

def test_that_waits():
    threading.Event().wait()

def test_after_it():
    pass
"""
IN_C = """
import ctypes

def test_that_waits():
    mutex, lock = ctypes.create_string_buffer(64), ctypes.PyDLL(None).pthread_mutex_lock
    lock(mutex), lock(mutex)
"""
LEFT = """
import threading

def test_that_leaves_a_thread():
    threading.Thread(target=threading.Event().wait).start()
"""


@pytest.mark.parametrize(
    ("test", "grace_s", "said"),
    [
        pytest.param(
            IN_PYTHON, 100, ("Timeout (>1.0s)", "1 failed, 1 passed"), marks=pytest.mark.deep, id="in Python"
        ),
        pytest.param(IN_C, 1, ("in test_that_waits", "Timeout (0:00:02)"), id="in C"),
        pytest.param(
            LEFT,
            100,
            ("1 passed", "Timeout (0:00:01)", "in wait"),
            marks=pytest.mark.deep,
            id="after the tests",
        ),
    ],
)
def test_what_never_ends_is_ended(test: str, grace_s: float, said: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "test_it.py"
    file.write_text(test)
    ended = subprocess.run(
        [sys.executable, "-c", RUN, file, str(grace_s)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=tmp_path,
    )
    assert ended.returncode == 1
    for words in said:
        assert words in ended.stdout + ended.stderr
