"""CuPy beside expertier on a real GPU, in a process of its own."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest


def test_an_integrator_with_cupy(gpu_name: str) -> None:
    if importlib.util.find_spec("cupy") is None:
        pytest.skip("CuPy is not installed: expertier[rocm] or expertier[cuda]")
    program = Path(__file__).parents[1] / "hip" / "gpu" / "cupy_program.py"
    result = subprocess.run(
        [sys.executable, str(program), gpu_name], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.count(" ok") == 4
