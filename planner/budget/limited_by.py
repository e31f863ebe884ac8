"""What keeps a tier from being larger than it is."""

from __future__ import annotations

from enum import StrEnum


class LimitedBy(StrEnum):
    """The limit that binds, which is the first thing to change for a larger tier."""

    SLOTS = "slots"
    """Nothing: there is a slot for every expert."""

    RESERVE = "reserve"
    """The device's memory, less the other consumers and what the reserve leaves free."""

    CAP = "cap"
    """The upper bound that the user set (MOE_POOL_CAP_MIB)."""

    POOL = "pool"
    """The size that was asked for: MOE_EXPERT_CACHE_MIB, MOE_HOST_POOL_MIB or MOE_HOST_POOL_FRAC."""

    RAM = "ram"
    """The RAM, less the other consumers and what is left to the page cache."""
