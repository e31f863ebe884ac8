"""The tests of a real pair, tried on two fake GPUs: so that they are right before anyone has the hardware."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from real_devices.process import DEVICES_VARIABLE, LLAMA_CPP_VARIABLE

PAIR = Path(__file__).with_name("pair")


@pytest.mark.deep
def test_all_of_them_pass() -> None:
    environment = {key: value for key, value in os.environ.items() if key != LLAMA_CPP_VARIABLE}
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(PAIR)],
        env={**environment, DEVICES_VARIABLE: "FAKE0,FAKE1"},
        cwd=PAIR.parents[2],
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
    assert "failed" not in ran.stdout
