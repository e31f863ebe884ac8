"""Compiles the fake driver and the fake runtime compiler."""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from expertier.added_flags import C_VARIABLE, CPP_VARIABLE, added_flags
from expertier.children import Children
from expertier.errors import BuildError
from expertier.hip.driver.vendor import TRAITS, Vendor
from expertier.hip.kernels.cache_folder import cache_subfolder
from expertier.trusted_folder import keep_from_others
from expertier.work_folder import work_folder

CORE = ("settings.c", "ranges.c", "memory.c", "pinned.c", "virtual.c", "streams.c", "work.c", "modules.c")
_FLAGS = ("-std=c11", "-O1", "-g", "-Wall", "-Wextra", "-shared", "-fPIC", "-pthread")
_COMPILER_FLAGS = ("-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-shared", "-fPIC", "-fvisibility=default")
_PARALLEL = 2
_SOURCES = (*CORE, "hip_names.c", "cuda_names.c", "rtc.cpp", "fake.h", "cpu_device.h")


@dataclass(frozen=True, slots=True)
class FakeLibraries:
    """The paths of the fake libraries; each has the file name of the vendor's own library."""

    hip: Path
    cuda: Path
    hiprtc: Path
    nvrtc: Path

    def environ(self, *vendors: Vendor) -> dict[str, str]:
        """Return the environment variables that make expertier open the fakes of `vendors`, by default of both."""
        made = {Vendor.HIP: (self.hip, self.hiprtc), Vendor.CUDA: (self.cuda, self.nvrtc)}
        variables = {}
        for vendor in vendors or tuple(Vendor):
            runtime, compiler = made[vendor]
            variables[TRAITS[vendor].library_variable] = str(runtime)
            variables[TRAITS[vendor].compiler_variable] = str(compiler)
        return variables


def build(folder: Path | None = None, environ: Mapping[str, str] = os.environ) -> FakeLibraries:
    """Compile the libraries, unless that was done before, and return their paths.

    They lie in a subfolder of `folder` that is named by a digest of sources and compiler flags; by default `folder` is
    in the user's cache folder. The compilers are $CC and $CXX, or cc and c++. Raises `BuildError` with the compiler's
    message.
    """
    sources = {name: files("expertier.hip.fake").joinpath(name).read_bytes() for name in _SOURCES}
    cc, cxx = shlex.split(environ.get("CC") or "cc"), shlex.split(environ.get("CXX") or "c++")
    c_flags = (*_FLAGS, *added_flags(C_VARIABLE, environ))
    cpp_flags = (*_COMPILER_FLAGS, *added_flags(CPP_VARIABLE, environ))
    parts = [
        *(name.encode() + sources[name] for name in _SOURCES),
        *(word.encode() for word in (*cc, *c_flags, *cxx, *cpp_flags)),
    ]
    digest = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    try:
        parent = folder or cache_subfolder("fake-gpu", environ)
        target = parent / digest
        libraries = FakeLibraries(
            target / "libamdhip64.so.7",
            target / "libcuda.so.1",
            target / "libhiprtc.so.7",
            target / "libnvrtc.so.13",
        )
        if not target.is_dir():
            parent.mkdir(parents=True, exist_ok=True)
            _build_into(parent, target, sources, [*cc, *c_flags], [*cxx, *cpp_flags])
    except OSError as error:
        raise BuildError(
            f"the fake GPU libraries cannot be made: {error}; they need a C and a C++ compiler and a folder to "
            "write to"
        ) from error
    return libraries


def _build_into(
    parent: Path, target: Path, sources: Mapping[str, bytes], cc: list[str], cxx: list[str]
) -> None:
    with work_folder(".new-", parent) as staging:
        for name, content in sources.items():
            (staging / name).write_bytes(content)
        commands = [
            # Symbolic binding keeps HIP's and CUDA's fake in one process from sharing their cores. No fake has its
            # vendor's soname: otherwise a program that asks the loader for the vendor's library would get the fake.
            [*cc, *CORE, names, "-Wl,-Bsymbolic", "-o", library, "-ldl"]
            for library, names in (("libamdhip64.so.7", "hip_names.c"), ("libcuda.so.1", "cuda_names.c"))
        ]
        for library, prefix, size, code in (
            ("libhiprtc.so.7", "hiprtc", "GetCodeSize", "GetCode"),
            ("libnvrtc.so.13", "nvrtc", "GetCUBINSize", "GetCUBIN"),
        ):
            words = {"PREFIX": prefix, "CODE_SIZE": size, "CODE": code}
            defines = [f"-DEXPERTIER_FAKE_{key}={value}" for key, value in words.items()]
            commands.append([*cxx, *defines, "rtc.cpp", "-o", library, "-ldl"])
        with Children() as children, ThreadPoolExecutor(_PARALLEL) as pool:
            try:
                list(pool.map(lambda command: _run(command, staging, children), commands))
            except BaseException:
                children.end()  # otherwise the end of the pool would wait for the compilers
                raise
        keep_from_others(staging)
        with suppress(OSError):  # raised where another process was first
            staging.rename(target)
        if not target.is_dir():
            raise BuildError(f"the fake GPU libraries could not be moved to {target}")


def _run(command: list[str], folder: Path, children: Children) -> None:
    result = children.run(command, folder=folder)
    if result.returncode:
        raise BuildError(f"{shlex.join(command)} failed: {result.stderr[-3000:]}")
