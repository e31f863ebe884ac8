"""Compiles C++ of the tests' own against the pinned engine's headers, as the plugin is compiled, once for all runs."""

from __future__ import annotations

import ctypes as ct
import hashlib
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from expertier.engine_adapter.build.cache import locked, make_subfolder, move_into_place, staging
from expertier.engine_adapter.build.compiler import compile_flags, find_compiler, include_flags
from expertier.engine_adapter.build.compiler import link_flags as usual_link_flags
from expertier.engine_adapter.build.headers import ensure_headers
from expertier.engine_adapter.build.pins import XLLAMACPP
from expertier.engine_adapter.build.plugin import installed_sources

LIMIT_S = 600
_PARALLEL = 2
_INCLUDED = ("*.h", "*.cu")


def build_library(
    name: str,
    sources: Sequence[Path],
    *,
    includes: Sequence[Path] = (),
    flags: Sequence[str] = ("-O0",),
    link_flags: Sequence[str] = (),
) -> Path:
    """Return the shared library of `sources`, compiled the first time and kept in the cache folder by what made it.

    The engine's symbols are found when it is loaded. `includes` are folders with headers in rooms.
    """
    compiler = find_compiler()
    beside = (path for source in sources for kind in _INCLUDED for path in source.parent.glob(kind))
    below = (path for folder in includes for kind in _INCLUDED for path in folder.rglob(kind))
    files = [*sources, *sorted({*beside, *below})]
    words = (str(XLLAMACPP), str(compiler), *compile_flags(), *usual_link_flags(), *flags, *link_flags)
    parts = [*(path.read_bytes() for path in files), *(word.encode() for word in words)]
    parent = make_subfolder(f"tests-{name}")
    target = parent / hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    library = target / f"lib{name}.so"
    with locked(parent / ".lock"):
        if not target.is_dir():
            with staging(parent) as folder:
                searched = [f"-I{path}" for path in includes]
                _compile(sources, folder / library.name, [*flags, *searched], link_flags)
                move_into_place(folder, target)
    return library


def load_proxy_part(name: str, *sources_of_proxy: str) -> ct.CDLL:
    """Load a part of the proxy by itself: sources of `ggml_proxy`, with the C functions of `NAME_calls.cpp` here."""
    proxy = installed_sources() / "ggml_proxy"
    sources = [
        Path(__file__).with_name(f"{name}_calls.cpp"),
        *(proxy / source for source in sources_of_proxy),
    ]
    return ct.CDLL(str(build_library(name, sources, includes=[proxy])))


def _compile(sources: Sequence[Path], output: Path, flags: Sequence[str], link_flags: Sequence[str]) -> None:
    headers = ensure_headers(XLLAMACPP)
    includes = include_flags(installed_sources(), headers)
    compiler = find_compiler().command

    def compile_one(source: Path) -> Path:
        made = output.with_name(f"{source.parent.name}-{source.stem}.o")
        command = [*compiler, *compile_flags(), *flags, *includes, "-c", str(source), "-o", str(made)]
        subprocess.run(command, check=True, timeout=LIMIT_S)
        return made

    with ThreadPoolExecutor(_PARALLEL) as pool:
        objects = list(pool.map(compile_one, sources, timeout=LIMIT_S))
    command = [*compiler, *usual_link_flags(), *link_flags, *map(str, objects), "-o", str(output)]
    subprocess.run(command, check=True, timeout=LIMIT_S)
    for made in objects:
        made.unlink()
