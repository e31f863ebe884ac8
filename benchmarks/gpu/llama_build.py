"""Builds llama.cpp from a source folder, unless its libraries exist already."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from expertier.engine_adapter.build.locate import find_folder
from expertier.errors import EngineMissingError

_COMMON = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=ON",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_TOOLS=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_SERVER=OFF",
    "-DLLAMA_BUILD_UI=OFF",
)
_CUDA = (
    "-DGGML_CUDA=ON",
    "-DGGML_CUDA_FA=OFF",  # its kernels take most of the build's time
    "-DGGML_CUDA_NCCL=OFF",
    "-DCMAKE_CUDA_ARCHITECTURES=native",
)


def ensure_llama_cpp(
    folder: Path, *, cuda: bool, more: Sequence[str], say: Callable[[str], None]
) -> dict[str, object]:
    """Build the libraries in `folder`/build unless they are there; returns what was done.

    `more` are options for CMake, after ours. Raises SystemExit with the build's last words when it fails.
    """
    try:
        engine = find_folder(folder)
        return {"engine": str(engine), "built_s": 0.0}
    except EngineMissingError as error:
        if not (folder / "CMakeLists.txt").is_file():
            raise SystemExit(str(error)) from error
    start = time.perf_counter()
    build = folder / "build"
    options = [*_COMMON, *(_CUDA if cuda else ()), *more]
    say(f"building llama.cpp in {build}: {' '.join(options)}")
    _run(["cmake", "-B", str(build), "-S", str(folder), *options])
    jobs = str(len(os.sched_getaffinity(0)))
    _run(["cmake", "--build", str(build), "--target", "llama", "-j", jobs])
    engine = find_folder(folder)
    return {
        "engine": str(engine),
        "built_s": time.perf_counter() - start,
        "options": options,
    }


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
    except OSError as error:
        raise SystemExit(f"llama.cpp could not be built: {command[0]}: {error.strerror}") from error
    if done.returncode != 0:
        raise SystemExit(
            f"llama.cpp could not be built: {' '.join(command)} ended with status {done.returncode}:\n"
            + done.stdout[-4000:]
        )
