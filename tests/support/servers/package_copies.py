"""Copies of the package with one file more, as somebody has who adds to it, and Python processes that use them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import expertier

FOLDERS = ("tiers", "planner", "hip", "engine_adapter")


def run_with_file(
    tmp_path: Path, file: str, content: str, code: str, *arguments: str, compiled: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run `code` with a copy of the package in `tmp_path` that has one more file, such as `tiers/file/modes/new.py`.

    Only the file's top folder is copied; links stand for all other folders. Without `compiled`, Numba compiles nothing.
    """
    package = Path(expertier.__file__).parent
    copy = tmp_path / "expertier"
    copy.mkdir()
    for path in package.glob("*.py"):
        (copy / path.name).symlink_to(path.resolve())
    changed = file.split("/", 1)[0]
    for folder in FOLDERS:
        if folder != changed:
            (copy / folder).symlink_to((package / folder).resolve())
    shutil.copytree(package / changed, copy / changed, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / file).write_text(content)
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={
            "PYTHONPATH": str(tmp_path),
            "NUMBA_DISABLE_JIT": str(int(not compiled)),
            "NUMBA_CACHE_DIR": str(tmp_path),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
