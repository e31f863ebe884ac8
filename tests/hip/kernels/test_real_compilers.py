"""The vendors' own compilers take our kernels; no GPU is needed, and none was there.

Where a compiler is missing, the test says which package has it. `.ci/run` installs them and sets
EXPERTIER_NEED_COMPILERS=1, so that there a missing one is a failure.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from devices.kernel_checks import BLOCK_SUMS
from expertier.errors import DeviceError
from expertier.hip.driver.libraries import load_compiler
from expertier.hip.driver.vendor import Vendor
from expertier.hip.kernels.cache import kernel_source
from expertier.hip.kernels.compiler import RuntimeCompiler

KERNELS = (b"move_rows", b"move_rows_by_value")
DEBIAN_HIP = "libamdhip64.so.5"


def missing(what: str) -> NoReturn:
    if os.environ.get("EXPERTIER_NEED_COMPILERS"):
        pytest.fail(f"{what}, and EXPERTIER_NEED_COMPILERS is set")
    pytest.skip(what)


@pytest.fixture(scope="module")
def hiprtc() -> RuntimeCompiler:
    """Debian's: its runtime library has the compiler in it."""
    try:
        library = ctypes.CDLL(DEBIAN_HIP)
    except OSError:
        missing(f"no {DEBIAN_HIP}: Debian 12's packages libamdhip64-5 and libhiprtc-builtins5")
    return RuntimeCompiler(Vendor.HIP, load_compiler(Vendor.HIP, library, {}))


@pytest.fixture(scope="module")
def nvrtc() -> RuntimeCompiler:
    try:
        return RuntimeCompiler(Vendor.CUDA, load_compiler(Vendor.CUDA, ctypes.CDLL(None), {}))
    except DeviceError:
        missing("no nvrtc: PyPI's package nvidia-cuda-nvrtc")


@pytest.mark.parametrize("architecture", ["gfx906", "gfx90a", "gfx1030"])
def test_hiprtc(hiprtc: RuntimeCompiler, architecture: str) -> None:
    code = hiprtc.compile(kernel_source("moves.cu"), architecture)
    assert architecture.encode() in code
    assert all(name in code for name in KERNELS)
    assert b"block_sums" in hiprtc.compile(BLOCK_SUMS, architecture)
    for name in ("device_lookup", "predict"):
        assert name.encode() in hiprtc.compile(kernel_source(f"{name}.cu"), architecture)


def test_nvrtc(nvrtc: RuntimeCompiler) -> None:
    code = nvrtc.compile(kernel_source("moves.cu"), "sm_90")
    assert code[:4] == b"\x7fELF"
    assert all(name in code for name in KERNELS)
    assert b"block_sums" in nvrtc.compile(BLOCK_SUMS, "sm_90")
    for name in ("device_lookup", "predict"):
        assert name.encode() in nvrtc.compile(kernel_source(f"{name}.cu"), "sm_90")


def test_their_words_for_a_mistake(hiprtc: RuntimeCompiler, nvrtc: RuntimeCompiler) -> None:
    source = 'extern "C" __global__ void broken() { nonsense }'
    for compiler, architecture in ((hiprtc, "gfx906"), (nvrtc, "sm_90")):
        with pytest.raises(
            DeviceError, match=rf"CompileProgram for {architecture} returned 6(.|\n)*nonsense"
        ):
            compiler.compile(source, architecture)


def _clang() -> str:
    """Return a clang that knows gfx1201, which came with 19."""
    for name in (
        "clang++-19",
        "clang-19",
        "clang++-20",
        "clang-20",
        "clang++-22",
        "clang-22",
        "clang++",
        "clang",
    ):
        path = shutil.which(name)
        if path:
            known = subprocess.run([path, "--target=amdgcn-amd-amdhsa", "-nogpulib", "--print-supported-cpus"],
                                   capture_output=True, text=True, timeout=120)  # fmt: skip
            if "gfx1201" in known.stdout + known.stderr:
                return path
    missing("no clang 19 or newer with the AMDGPU target: Debian's package clang-19")


@pytest.mark.parametrize(("architecture", "wave"), [("gfx942", 64), ("gfx1100", 32), ("gfx1201", 32)])
def test_clang(architecture: str, wave: int, tmp_path: Path) -> None:
    source = tmp_path / "moves.hip"
    source.write_text(kernel_source("moves.cu"))
    output = tmp_path / "moves.s"
    prelude = Path(__file__).with_name("amdgcn_prelude.h")
    subprocess.run(
        [_clang(), "-x", "hip", f"--offload-arch={architecture}", "--offload-device-only", "-nogpuinc", "-nogpulib",
         "-O3", "-Wall", "-Werror", "-include", str(prelude), "-S", str(source), "-o", str(output)],
        check=True,
        timeout=120,
    )  # fmt: skip
    assembly = output.read_text()
    assert all(f"{name.decode()}:" in assembly for name in KERNELS)
    assert re.search(r"global_load_(dwordx4|b128)", assembly), "whole vectors are loaded"
    # Rows given by value stay where arguments are: nobody copies their 1,536 bytes to memory of a thread's own.
    assert all(int(size) < 64 for size in re.findall(r"\.private_segment_fixed_size: (\d+)", assembly))
    assert set(re.findall(r"\.vgpr_spill_count: (\d+)", assembly)) == {"0"}
    assert re.search(rf"\.wavefront_size: {wave}\b", assembly)


def test_debians_hip_without_a_gpu() -> None:
    """The real library's error paths. In a process of its own: it starts threads and keeps state."""
    try:
        ctypes.CDLL(DEBIAN_HIP)
    except OSError:
        missing(f"no {DEBIAN_HIP}: Debian 12's package libamdhip64-5")
    code = """
import expertier as et, logging
from expertier.hip.driver.driver import open_driver
from expertier.hip.driver.vendor import Vendor
logging.basicConfig(level="INFO", format="%(message)s")
driver = open_driver(Vendor.HIP)
uses = [lambda: et.open_device("hip:0"), lambda: driver.call("alloc", None, 1)]
for use in [*uses, lambda: driver.integer("get_device")]:
    try:
        use()
    except et.DeviceError as error:
        print(error)
print(driver.missing)
print(et.open_device("auto").name)
"""
    environ = {**os.environ, "EXPERTIER_HIP_LIBRARY": DEBIAN_HIP}
    environ["EXPERTIER_CUDA_LIBRARY"] = "/nowhere.so"
    result = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True, timeout=120
    )
    opened, allocated, current, absent, chosen = result.stdout.splitlines()
    if "returned" not in opened:
        pytest.skip(f"this machine has an AMD GPU: {opened}")
    assert re.fullmatch(
        r"asked for device 'hip:0': hip\w+ returned 10[01] \(hipError(NoDevice|InvalidDevice)\)", opened
    )
    assert re.search(r"hipMalloc returned \d+ \(hipError\w+\)", allocated)
    assert re.search(r"hipGetDevice returned 10[01] \(hipError\w+\)", current)
    assert absent == "['hipGetDevicePropertiesR0600']"
    assert chosen == "host"
    assert re.search(r"device auto is the host: hip: hip\w+ returned 10[01]", result.stderr)
