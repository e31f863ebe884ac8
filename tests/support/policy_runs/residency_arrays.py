"""The arrays of a `Residency`, for tests that compare all of them."""

from __future__ import annotations

ARRAYS = (
    "slot_of",
    "heat",
    "owner",
    "state",
    "pins",
    "order",
    "evicted_by",
    "counters",
    "notes",
    "first",
    "n_slots",
    "n_experts",
)
"""The names of the arrays."""
