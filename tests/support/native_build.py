"""Compiles C++ of the tests' own against the pinned engine's headers, as the plugin is compiled."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from expertier.engine_adapter.build.compiler import COMPILE_FLAGS, LINK_FLAGS, find_compiler
from expertier.engine_adapter.build.header_root import HEADER_FOLDERS
from expertier.engine_adapter.build.headers import ensure_headers
from expertier.engine_adapter.build.pins import XLLAMACPP


def build_library(sources: Sequence[Path], output: Path, flags: Sequence[str] = ()) -> Path:
    """Compile `sources` into the shared library `output`; the engine's symbols are found when it is loaded."""
    headers = ensure_headers(XLLAMACPP)
    includes = [part for folder in HEADER_FOLDERS for part in ("-isystem", str(headers / folder))]
    command = [*find_compiler().command, *COMPILE_FLAGS, *LINK_FLAGS, "-O1", "-Werror", *flags, *includes]
    subprocess.run([*command, *map(str, sources), "-o", str(output)], check=True)
    return output
