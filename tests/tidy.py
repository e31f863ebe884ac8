"""`make tidy`: clang-tidy over all our C and C++, with the flags of the real builds. `.clang-tidy` has the checks."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from expertier.engine_adapter.build.compiler import COMPILE_FLAGS, include_flags
from expertier.engine_adapter.build.headers import ensure_headers
from expertier.engine_adapter.build.pins import XLLAMACPP
from expertier.hip.fake.build import _FLAGS as FAKE_FLAGS

ROOT = Path(__file__).parents[1]
FOLDERS = ("engine_adapter", "hip", "tests", "benchmarks")
NOT_OURS = ("generated_models.cpp",)  # ten lines around the engine's own generator
FAKE_GPU = ROOT / "tests" / "support" / "fake_ggml_gpu"  # its C++ includes headers by their room
LIMIT_S = 300
_RTC_NAMES = {"PREFIX": "nvrtc", "CODE_SIZE": "GetCUBINSize", "CODE": "GetCUBIN"}


def list_files() -> list[Path]:
    """Return every C and C++ file of ours that is compiled by itself."""
    found = (path for folder in FOLDERS for kind in ("*.cpp", "*.c") for path in (ROOT / folder).rglob(kind))
    return sorted(path for path in found if path.name not in NOT_OURS)


def flags_for(path: Path) -> list[str]:
    """Return the flags that the file's build has."""
    if path.suffix == ".c":
        return [*(flag for flag in FAKE_FLAGS if flag != "-shared"), f"-I{sysconfig.get_path('include')}"]
    kernels = [f"-I{ROOT / 'hip' / name}" for name in ("fake", "kernels")]
    names = [f"-DEXPERTIER_FAKE_{key}={name}" for key, name in _RTC_NAMES.items()]
    engine = include_flags(ROOT / "engine_adapter", ensure_headers(XLLAMACPP))
    return [
        *COMPILE_FLAGS,
        *engine,
        *kernels,
        f"-I{FAKE_GPU}",
        *(names if path.name == "rtc.cpp" else []),
        "-Wno-unknown-pragmas",
    ]


def check(path: Path) -> str:
    """Return what clang-tidy says of a file; empty: nothing."""
    tool = Path(sys.executable).with_name("clang-tidy")
    command = [str(tool), "--quiet", str(path), "--", *flags_for(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False, cwd=ROOT)
    return (done.stdout + done.stderr).strip() if done.returncode else ""


def main() -> int:
    """Check the files that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=Path)
    files = [path.resolve() for path in parser.parse_args().files] or list_files()
    begun = time.monotonic()
    ensure_headers(XLLAMACPP)
    with ThreadPoolExecutor(os.cpu_count() or 1) as threads:
        said = list(filter(None, threads.map(check, files)))  # no limit: clang-tidy ends by itself
    print("\n".join(said))
    print(f"tidy: {len(files)} files, {len(said)} with findings, {time.monotonic() - begun:.0f} s")
    return bool(said)


if __name__ == "__main__":
    sys.exit(main())
