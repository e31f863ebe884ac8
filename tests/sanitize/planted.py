"""Calls one of the bugs of planted.cpp, compiled as the fakes are."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

from engine_runs.native_build import build_library

_ARGUMENTS = {"race": (), "heap_overflow": (4,), "integer_overflow": (1,)}


def main() -> None:
    """Call it."""
    bug = sys.argv[1]
    library = ctypes.CDLL(str(build_library("planted", [Path(__file__).with_suffix(".cpp")])))
    getattr(library, bug)(*_ARGUMENTS[bug])


if __name__ == "__main__":
    main()
