"""A few seconds of `benchmarks/soak.py`: threads, faults and moves at once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parents[2] / "benchmarks" / "soak.py"


MUST_HAPPEN = ("epochs", "lease", "experts compared", "l1 misses", "moves moves", "failed as planned")


@pytest.mark.parametrize("device", ["host", pytest.param("fake", marks=pytest.mark.deep)])
def test_soak(device: str) -> None:
    """For as long as it takes until everything has happened, which a busy machine needs more time for."""
    for minutes in (0.05, 0.5, 4):
        counts = soak(device, minutes)
        if all(counts.get(name) for name in MUST_HAPPEN):
            return
    pytest.fail(f"something did not happen: {counts}")


def soak(device: str, minutes: float) -> dict[str, int]:
    """Run it; returns what it counted, once nothing was wrong."""
    done = subprocess.run(
        [
            sys.executable,
            SOAK,
            "--minutes",
            str(minutes),
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
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    said = json.loads(done.stdout)
    assert said["wrong"] == []
    return dict(said["counts"])
