"""SHA-256 of files and of sets of files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_files(paths: Iterable[Path], root: Path) -> str:
    """Return one SHA-256 over several files: their paths below `root` and their contents, in sorted order."""
    total = hashlib.sha256()
    for path in sorted(paths):
        total.update(f"{path.relative_to(root).as_posix()}\0{hash_file(path)}\n".encode())
    return total.hexdigest()


def hash_text(*parts: str) -> str:
    """Return one SHA-256 over several texts, which depends on where one text ends and the next begins."""
    total = hashlib.sha256()
    for part in parts:
        data = os.fsencode(part)  # a path may hold bytes that are no UTF-8
        total.update(f"{len(data)}\0".encode())
        total.update(data)
    return total.hexdigest()
