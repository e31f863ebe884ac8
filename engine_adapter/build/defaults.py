"""The engine's default parameters, field by field: the most sensitive sign that two commits differ.

A field that was added, moved or given another meaning shows up as another value when the plugin's host,
compiled against the pinned headers, asks the engine's library for its defaults.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

Value = bool | int | float | str | None
"""A field's value: a number (enumerations as integers), None for a null pointer, "set" for any other pointer."""

Defaults = Mapping[str, Mapping[str, Value]]
"""By structure ("model", "context"), then by field."""

_TOLERANCE = 1e-6  # what single-precision fields may lose when they are printed and read back


def differences(recorded: Defaults, found: Defaults) -> list[str]:
    """List the fields that differ, one line each; empty when all fields agree."""
    lines = []
    for structure in sorted(recorded.keys() | found.keys()):
        ours, theirs = recorded.get(structure, {}), found.get(structure, {})
        for field in sorted(ours.keys() | theirs.keys()):
            if field not in theirs:
                lines.append(f"{structure}.{field}: recorded {ours[field]!r}, missing now")
            elif field not in ours:
                lines.append(f"{structure}.{field}: not recorded, now {theirs[field]!r}")
            elif not _same(ours[field], theirs[field]):
                lines.append(f"{structure}.{field}: recorded {ours[field]!r}, now {theirs[field]!r}")
    return lines


def _same(a: Value, b: Value) -> bool:
    """Compare two values; numbers may differ by what printing a float loses."""
    if isinstance(a, int | float) and isinstance(b, int | float):
        return math.isclose(a, b, rel_tol=_TOLERANCE, abs_tol=0.0)
    return a == b
