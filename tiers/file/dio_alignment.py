"""The alignment of addresses and file offsets that O_DIRECT demands."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import NamedTuple

_FALLBACK = 4096  # bytes; the largest logical block of disks today, and a page
_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000


class DioAlignment(NamedTuple):
    """The alignment of direct reads, in bytes, as powers of two.

    Buffer addresses must be multiples of `memory`; file offsets and lengths must be multiples of `offset`.
    """

    memory: int
    offset: int


class _Statx(ctypes.Structure):
    """The kernel's `struct statx`, with names for the fields used here; every architecture has this layout."""

    _fields_ = (
        ("mask", ctypes.c_uint32),
        ("unused", ctypes.c_uint8 * 148),
        ("dio_memory", ctypes.c_uint32),
        ("dio_offset", ctypes.c_uint32),
        ("spare", ctypes.c_uint8 * 96),
    )


def dio_alignment(descriptor: int) -> DioAlignment | None:
    """Return the alignment that an open file's file system demands; None where it has no direct reads.

    Kernels before 6.1 and some file systems do not tell. The answer is then 4096 bytes, which is right for the disks
    that they are used with.
    """
    said = _Statx()
    statx = _statx()
    if statx is None or statx(descriptor, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, ctypes.byref(said)) != 0:
        return DioAlignment(_FALLBACK, _FALLBACK)
    if not said.mask & _STATX_DIOALIGN:
        return DioAlignment(_FALLBACK, _FALLBACK)
    if said.dio_offset == 0:
        return None
    return DioAlignment(max(int(said.dio_memory), 1), int(said.dio_offset))


@functools.cache
def _statx() -> Callable[..., int] | None:
    """Return libc's function `statx`; None where libc has none. Python's `os` has `statx` from 3.15 on."""
    try:
        function = ctypes.CDLL(None).statx
    except (OSError, AttributeError):
        return None
    function.restype = ctypes.c_int
    function.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p)
    return function
