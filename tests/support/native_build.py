"""Compiles C++ of the tests' own against the pinned engine's headers, as the plugin is compiled."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from expertier.engine_adapter.build.compiler import COMPILE_FLAGS, LINK_FLAGS, find_compiler
from expertier.engine_adapter.build.header_root import HEADER_FOLDERS
from expertier.engine_adapter.build.headers import ensure_headers
from expertier.engine_adapter.build.pins import XLLAMACPP

_PARALLEL = 2
LIMIT_S = 600


def build_library(
    sources: Sequence[Path], output: Path, *, flags: Sequence[str] = (), link_flags: Sequence[str] = ()
) -> Path:
    """Compile `sources` into the shared library `output`; the engine's symbols are found when it is loaded."""
    headers = ensure_headers(XLLAMACPP)
    includes = [part for folder in HEADER_FOLDERS for part in ("-isystem", str(headers / folder))]
    compiler = find_compiler().command

    def compile_one(source: Path) -> str:
        made = str(output.with_name(f"{source.stem}.o"))
        command = [*compiler, *COMPILE_FLAGS, "-O0", *flags, *includes, "-c", str(source), "-o", made]
        subprocess.run(command, check=True, timeout=LIMIT_S)
        return made

    with ThreadPoolExecutor(_PARALLEL) as pool:
        objects = list(pool.map(compile_one, sources, timeout=LIMIT_S))
    subprocess.run(
        [*compiler, *LINK_FLAGS, *link_flags, *objects, "-o", str(output)], check=True, timeout=LIMIT_S
    )
    return output
