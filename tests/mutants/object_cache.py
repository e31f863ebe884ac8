"""A C++ compiler that remembers: `$CXX` of the mutants' runs, which all compile the plugin but for one file alike.

`python -I -S object_cache.py FOLDER COMPILER...` runs the compiler with what follows. An object of a file below a
folder `ggml_proxy` is kept in FOLDER by what it was made from: the flags, the file, and each header below that folder
that it includes. It is compiled without optimisation, which takes half the time. Everything else goes to the compiler
as it is. The engine's own headers are taken to be the same in all runs that share FOLDER.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

_INCLUDE = re.compile(rb'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
_PATHS = ("-isystem", "-I", "-o", "-c")  # what follows each of these says where something is, not what


LIMIT_S = 600


def root_of(source: Path) -> Path | None:
    """Return the folder that includes begin at: the `ggml_proxy` that a file lies below, if any."""
    return next((folder for folder in source.parents if folder.name == "ggml_proxy"), None)


def texts(path: Path, root: Path, found: dict[Path, bytes]) -> dict[Path, bytes]:
    """Add a file's text, and those of the headers below `root` that it includes, to `found`, and return that."""
    if path not in found and path.is_file():
        found[path] = path.read_bytes()
        for name in _INCLUDE.findall(found[path]):
            texts(root / name.decode(), root, found)
    return found


def key(command: list[str], source: Path, root: Path) -> str:
    """Return a name for the object that the command makes of the source."""
    flags = [word for before, word in zip(["", *command], command, strict=False) if before not in _PATHS]
    parts = [word.encode() for word in flags]
    for path, text in sorted(texts(source, root, {}).items()):
        parts += [str(path.relative_to(root)).encode(), text]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


def compile_once(folder: Path, command: list[str], source: Path, root: Path, made: Path) -> int:
    """Make the object, by the compiler or from what is kept; return the compiler's exit status."""
    kept = folder / f"{key(command, source, root)}.o"
    if not kept.exists():
        status = subprocess.run([*command, "-O0"], check=False, timeout=LIMIT_S).returncode
        if status:
            return status
        fresh = kept.with_suffix(f".{os.getpid()}")
        shutil.copyfile(made, fresh)
        fresh.rename(kept)
        return 0
    shutil.copyfile(kept, made)
    return 0


def main() -> int:
    """Compile."""
    folder, command = Path(sys.argv[1]), sys.argv[2:]
    after = dict(pairwise(command))
    source = Path(after.get("-c", ""))
    root = root_of(source)
    if root is not None and "-o" in after:
        return compile_once(folder, command, source, root, Path(after["-o"]))
    return subprocess.run(command, check=False, timeout=LIMIT_S).returncode


if __name__ == "__main__":
    sys.exit(main())
