"""A few seconds of `benchmarks/soak.py`: threads, faults and moves at once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parents[2] / "benchmarks" / "soak.py"


@pytest.mark.parametrize("device", ["host", "fake"])
def test_soak(device: str) -> None:
    done = subprocess.run(
        [
            sys.executable,
            SOAK,
            "--minutes",
            "0.05",
            "--threads",
            "5",
            "--epoch",
            "1.5",
            "--device",
            device,
            "--json",
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    said = json.loads(done.stdout)
    assert said["wrong"] == []
    assert said["counts"]["epochs"] >= 1
    for name in ("lease", "experts compared", "l1 misses", "moves moves", "failed as planned"):
        assert said["counts"][name] > 0, f"{name}: nothing happened"
