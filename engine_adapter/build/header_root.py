"""A folder with an engine's headers (include/, ggml/include/, ggml/src/), and what it says about itself."""

from __future__ import annotations

import re
from pathlib import Path

from expertier.engine_adapter.build.hashing import hash_files
from expertier.engine_adapter.build.pins import SUPPORTED_API_VERSIONS
from expertier.errors import EngineMismatchError, EngineMissingError

HEADER_FOLDERS = ("include", "ggml/include", "ggml/src")
"""The folders that a compiler gets as include paths; only files directly inside them count."""

_NEEDED = ("include/llama.h", "ggml/include/ggml-backend.h", "ggml/src/ggml-backend-impl.h")
_API_VERSION = re.compile(r"^\s*#\s*define\s+GGML_BACKEND_API_VERSION\s+(\d+)", re.MULTILINE)


def list_headers(root: Path) -> list[Path]:
    """Return the headers below `root`. Errors: EngineMissingError, when a header that we need is missing."""
    missing = [name for name in _NEEDED if not (root / name).is_file()]
    if missing:
        raise EngineMissingError(
            f"{root} is no llama.cpp source folder: it has no {', '.join(missing)}; "
            "name the folder of a llama.cpp source tree, with its libraries built inside"
        )
    return sorted(path for folder in HEADER_FOLDERS for path in (root / folder).glob("*.h"))


def hash_headers(root: Path) -> str:
    """Return one SHA-256 over all headers below `root`."""
    return hash_files(list_headers(root), root)


def read_api_version(root: Path) -> int:
    """Return GGML_BACKEND_API_VERSION of the headers.

    Errors: EngineMismatchError, when the plugin's source does not know that version; EngineMissingError.
    """
    list_headers(root)
    header = root / "ggml/src/ggml-backend-impl.h"
    match = _API_VERSION.search(header.read_text(encoding="utf-8", errors="replace"))
    known = " and ".join(str(version) for version in SUPPORTED_API_VERSIONS)
    if match is None:
        raise EngineMismatchError(
            f"{header} defines no GGML_BACKEND_API_VERSION; expertier knows backend API {known}: "
            "use a llama.cpp of that API"
        )
    version = int(match[1])
    if version not in SUPPORTED_API_VERSIONS:
        raise EngineMismatchError(
            f"{header} is of backend API {version}; this expertier knows {known}: "
            "use a llama.cpp of that API, or a newer expertier"
        )
    return version


def read_ggml_version(root: Path) -> str | None:
    """Return ggml's version from ggml/CMakeLists.txt, None where it cannot be read there."""
    lists = root / "ggml/CMakeLists.txt"
    if not lists.is_file():
        return None
    text = lists.read_text(encoding="utf-8", errors="replace")
    parts = [
        re.search(rf"set\(\s*GGML_VERSION_{part}\s+(\d+)\s*\)", text) for part in ("MAJOR", "MINOR", "PATCH")
    ]
    numbers = [part[1] for part in parts if part]
    return ".".join(numbers) if len(numbers) == len(parts) else None
