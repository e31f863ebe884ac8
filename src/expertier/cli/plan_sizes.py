"""Sizes as people write them: `16GiB`, `32 GB`, `512MiB`, or a number of MiB."""

from __future__ import annotations

import re

from expertier.errors import ConfigError
from expertier.units import GIB, MIB

_UNITS = {
    "": MIB,
    "mib": MIB,
    "m": MIB,
    "gib": GIB,
    "g": GIB,
    "gb": 10**9,
    "mb": 10**6,
    "tib": 1024 * GIB,
    "tb": 10**12,
}
_SIZE = re.compile(r"(\d{1,12}(?:\.\d{1,6})?)\s*([a-z]*)", re.ASCII)


def parse_size(option: str, text: str) -> int:
    """Return the bytes of a size; a bare number counts MiB. Raises ConfigError that names the option."""
    found = _SIZE.fullmatch(text.strip().lower())
    if found is None or found[2] not in _UNITS or not float(found[1]) * _UNITS[found[2]] >= 1:
        raise ConfigError(f"{option} is {text!r}: give a size such as 16GiB, 24 GB or 8192 (MiB)")
    return int(float(found[1]) * _UNITS[found[2]])
