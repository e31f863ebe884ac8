"""Finds a C++17 compiler and makes the plugin's two libraries with it.

The folder `ggml_proxy` makes the proxy library, `llama_host` the host library. Neither is linked against the
engine: its symbols resolve when the library is loaded into a process that has loaded the engine globally.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from expertier.added_flags import CPP_VARIABLE, added_flags
from expertier.children import Children
from expertier.engine_adapter.build.header_root import HEADER_FOLDERS
from expertier.engine_adapter.build.progress import Progress, silent
from expertier.errors import BuildError

PROXY_LIBRARY = "libexpertier_proxy.so"
HOST_LIBRARY = "libexpertier_host.so"
PROXY_FOLDER = "ggml_proxy"
HOST_FOLDER = "llama_host"

COMPILE_FLAGS = (
    "-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden",
    "-Wall", "-Wextra", "-Werror=return-type", "-pthread",
)  # fmt: skip
LINK_FLAGS = ("-shared", "-pthread")

_CANDIDATES = ("c++", "g++", "clang++")
_PARALLEL = 2
_LAST_LINES = 30
_PROBE = "#include <string_view>\nint main() { return static_cast<int>(std::string_view().size()); }\n"


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C++ compiler's command and the first line of the version that it prints."""

    command: tuple[str, ...]
    version: str

    def __str__(self) -> str:
        """Name the compiler for a message."""
        return f"{shlex.join(self.command)} ({self.version})"


def list_compilers(environ: Mapping[str, str] = os.environ) -> Iterator[Compiler]:
    """Yield the compilers on this machine: $CXX alone where it is set, or c++, g++ and clang++ on the PATH.

    Errors: BuildError, when $CXX is set and does not run.
    """
    chosen = environ.get("CXX", "").strip()
    names = [tuple(shlex.split(chosen))] if chosen else [(name,) for name in _CANDIDATES]
    seen: set[str] = set()
    for command in names:
        path = shutil.which(command[0], path=environ.get("PATH"))
        version = _version((path, *command[1:])) if path else None
        if path is None or version is None:
            if chosen:
                raise BuildError(
                    f"the compiler that $CXX names, {chosen!r}, does not run; unset CXX or name another"
                )
            continue
        if os.path.realpath(path) not in seen:
            seen.add(os.path.realpath(path))
            yield Compiler((path, *command[1:]), version)


def find_compiler(environ: Mapping[str, str] = os.environ) -> Compiler:
    """Return the first compiler that compiles C++17. Errors: BuildError, saying what was tried."""
    failures = []
    for compiler in list_compilers(environ):
        result = _run([*compiler.command, *COMPILE_FLAGS, "-fsyntax-only", "-x", "c++", "-"], stdin=_PROBE)
        if result.returncode == 0:
            return compiler
        failures.append(f"{compiler} does not compile C++17: {_tail(result.stdout, 3)}")
    tried = "; ".join(failures) or f"there is no {', '.join(_CANDIDATES)} on the PATH and $CXX is not set"
    raise BuildError(
        f"no C++17 compiler to build the plugin with: {tried}; install one, for instance: apt install g++"
    )


def compile_flags(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return the options for each file of the plugin."""
    return (*COMPILE_FLAGS, *added_flags(CPP_VARIABLE, environ))


def link_flags(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return the options for each library of the plugin."""
    return (*LINK_FLAGS, *added_flags(CPP_VARIABLE, environ))


def list_sources(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the C++ files of the proxy library and those of the host library, below `folder`, sorted.

    Errors: BuildError, when the folder has none of one kind.
    """
    proxy, host = (sorted((folder / name).rglob("*.cpp")) for name in (PROXY_FOLDER, HOST_FOLDER))
    if not host or not proxy:
        raise BuildError(
            f"the plugin's C++ sources are not all in {folder} ({len(proxy)} of the proxy, {len(host)} of "
            "the host): the installation is damaged; reinstall expertier"
        )
    return proxy, host


def include_flags(sources: Path, headers: Path) -> list[str]:
    """Return the compiler's options for our own headers below `sources` and the engine's in `headers`."""
    own = [part for folder in (sources / PROXY_FOLDER, sources) for part in ("-I", str(folder))]
    return [*own, *(part for folder in HEADER_FOLDERS for part in ("-isystem", str(headers / folder)))]


def compile_libraries(
    compiler: Compiler, sources: Path, headers: Path, output: Path, progress: Progress = silent
) -> tuple[Path, Path]:
    """Compile the C++ files below `sources` against the engine's `headers` and link them in the folder `output`.

    Returns the proxy library and the host library. Objects are left beside them, in `output`/objects.
    Errors: BuildError, with the command that failed and the last lines of what the compiler said.
    """
    proxy, host = list_sources(sources)
    objects = output / "objects"
    objects.mkdir(parents=True)
    includes = include_flags(sources, headers)
    every = [*proxy, *host]
    progress(f"compiling {len(every)} files with {compiler}")

    def compile_one(source: Path) -> Path:
        made = objects / f"{source.parent.name}-{source.stem}.o"
        command = [*compiler.command, *compile_flags(), *includes, "-c", str(source), "-o", str(made)]
        _require_done(_run(command, children))
        return made

    with Children() as children, ThreadPoolExecutor(_PARALLEL) as pool:
        try:
            pending = [pool.submit(compile_one, source) for source in every]
            made = [future.result() for future in pending]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            children.end()  # otherwise the pool's end would wait for these compilers
            raise
    libraries = (output / PROXY_LIBRARY, output / HOST_LIBRARY)
    for library, parts in zip(libraries, (made[: len(proxy)], made[len(proxy) :]), strict=True):
        _require_done(_run([*compiler.command, *link_flags(), *map(str, parts), "-o", str(library)]))
    return libraries


def _version(command: Sequence[str]) -> str | None:
    """Return the first line of `command --version`; None when the command does not run."""
    try:
        result = _run([*command, "--version"])
    except OSError:
        return None
    lines = result.stdout.strip().splitlines()
    return lines[0] if result.returncode == 0 and lines else None


def _require_done(ended: subprocess.CompletedProcess[str]) -> None:
    if ended.returncode != 0:
        raise BuildError(
            f"the plugin could not be compiled: the compiler ended with status {ended.returncode}\n"
            f"  {shlex.join(ended.args)}\n{_tail(ended.stdout, _LAST_LINES)}"
        )


def _run(
    command: list[str], children: Children | None = None, stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "LC_ALL": "C"}
    return (children or Children()).run(command, stdin=stdin, merges_errors=True, environ=environ)


def _tail(text: str, n_lines: int) -> str:
    return "\n".join(text.strip().splitlines()[-n_lines:])
