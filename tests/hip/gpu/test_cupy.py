"""CuPy beside expertier, on the fake driver: the real ROCm wheel, in a process of its own. Deep: the wheel is large."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from devices.cupy_on_fake import make_libraries
from expertier.errors import DeviceError
from expertier.hip.fake import FakeLibraries
from expertier.hip.gpu.cupy_interop import load_cupy

_WHEEL = "cupy-rocm-7-0>=14,<15"


@pytest.fixture(scope="module")
def cupy_site(request: pytest.FixtureRequest) -> Path:
    """CuPy in a folder of its own, kept between runs."""
    folder = Path(request.config.cache.mkdir("cupy-rocm")) / "site"
    if not folder.is_dir():
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), _WHEEL]
        result = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if result.returncode:
            pytest.skip(f"{_WHEEL} could not be installed: {result.stderr[-300:]}")
    return folder


@pytest.mark.deep
def test_an_integrator_with_cupy(cupy_site: Path, fake_libraries: FakeLibraries, tmp_path: Path) -> None:
    libraries = tmp_path / "rocm"
    make_libraries(cupy_site, fake_libraries.hiprtc, libraries)
    environ = {
        **os.environ,
        "PYTHONPATH": str(cupy_site),
        "LD_LIBRARY_PATH": str(libraries),
        "CUPY_CACHE_DIR": str(tmp_path / "kernels"),
        "EXPERTIER_HIP_LIBRARY": str(libraries / "libamdhip64.so.7"),
        "EXPERTIER_HIPRTC_LIBRARY": str(fake_libraries.hiprtc),
    }
    program = Path(__file__).with_name("cupy_program.py")
    result = subprocess.run(
        [sys.executable, str(program), "hip:0"],
        env=environ,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.splitlines() == [
        "slots_as_arrays ok",
        "experts_of_a_lease ok",
        "slab_in_cupys_memory ok",
        "memory_that_cupy_lacks ok",
    ]


def test_without_cupy_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(DeviceError, match=r"install expertier\[rocm\] or expertier\[cuda\], one of them"):
        load_cupy()
