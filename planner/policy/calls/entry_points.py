"""Addresses of the compiled policy."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class EntryPoints:
    """Addresses of the policy's C functions; the signatures are in `native.py`.

    The code stays loaded as long as this object (`native.entry_points` keeps the one it made for good).
    """

    begin: int
    complete: int
    abort: int
    release: int
    resident_first: int
    begin_prefetch: int
    begin_prefetch_into: int
    victims: int
    pin_ready: int
    is_fully_resident: int
    version: int
    evicted_by: int
    _owners: tuple[object, ...] = field(repr=False, compare=False)
