"""Finds the files that this process has loaded its libraries from, by asking the dynamic linker.

A wheel holds `libggml.so`, `libggml.so.0` and `libggml.so.0.25.3` as copies, not links. Loading any other file than the
one in use would bring a second ggml, with a registry of its own.
"""

from __future__ import annotations

import ctypes as ct
from collections.abc import Iterable
from pathlib import Path


class _Found(ct.Structure):
    """Dl_info of dlfcn.h."""

    _fields_ = (
        ("file", ct.c_char_p),
        ("base", ct.c_void_p),
        ("symbol", ct.c_char_p),
        ("address", ct.c_void_p),
    )


def libraries_in_use(library: ct.CDLL, symbols: Iterable[str]) -> tuple[Path, ...]:
    """Return the files that define `symbols`, as `library` and its dependencies see them: in this order, each once.

    A symbol that no library defines is passed over.
    """
    dladdr = ct.CDLL(None).dladdr
    dladdr.restype = ct.c_int
    dladdr.argtypes = (ct.c_void_p, ct.POINTER(_Found))
    files: dict[Path, None] = {}
    for symbol in symbols:
        try:
            address = ct.cast(getattr(library, symbol), ct.c_void_p)
        except AttributeError:
            continue
        found = _Found()
        if dladdr(address, ct.byref(found)) and found.file:
            files[Path(found.file.decode())] = None
    return tuple(files)
