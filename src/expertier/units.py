"""Byte sizes: the code counts bytes everywhere; only what a person reads or writes is in MiB."""

from __future__ import annotations

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB


def mib(n_bytes: int) -> str:
    """Format a byte count for a person, in MiB with one decimal (three below 1 MiB)."""
    value = n_bytes / MIB
    return f"{value:.1f} MiB" if value >= 1 or n_bytes == 0 else f"{value:.3f} MiB"


def mib_needed(n_bytes: int) -> int:
    """Return the smallest whole number of MiB that holds `n_bytes`."""
    return -(-n_bytes // MIB)


def round_up(n_bytes: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `n_bytes`."""
    return -(-n_bytes // multiple) * multiple
