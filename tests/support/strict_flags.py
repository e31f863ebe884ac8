"""Warnings that are errors in every C and C++ file of ours, wherever a test or a check compiles it.

A user's own build has none of them: a newer compiler's new warning must not break it. GCC and Clang know them all.
"""

from __future__ import annotations

import os
import shlex

from expertier.added_flags import C_VARIABLE, CPP_VARIABLE

_COMMON = (
    "-Werror",
    "-Wall",
    "-Wextra",
    "-Wcast-qual",
    "-Wconversion",
    "-Wdouble-promotion",
    "-Wformat=2",
    "-Wnull-dereference",
    "-Wpointer-arith",
    "-Wredundant-decls",
    "-Wshadow",
    "-Wundef",
    "-Wvla",
    "-Wno-sign-conversion",  # part of -Wconversion in C: sizes and indices of both kinds meet everywhere
    "-Wno-unknown-pragmas",  # kernels have pragmas of the GPU's compilers
)
STRICT_C = (*_COMMON, "-Wold-style-definition", "-Wstrict-prototypes")
STRICT_CPP = (
    *_COMMON,
    "-Wdeprecated-copy-dtor",
    "-Wextra-semi",
    "-Wnon-virtual-dtor",
    "-Woverloaded-virtual",
    "-Wsuggest-override",
    "-Wzero-as-null-pointer-constant",
)


def make_strict() -> None:
    """Have all that this process and its children compile be strict, where the variables say nothing else."""
    os.environ.setdefault(C_VARIABLE, shlex.join(STRICT_C))
    os.environ.setdefault(CPP_VARIABLE, shlex.join(STRICT_CPP))
