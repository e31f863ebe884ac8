"""The eviction policies by name."""

from __future__ import annotations

from enum import StrEnum


class PolicyKind(StrEnum):
    """How a victim is chosen; the values are the words that a user writes."""

    LFU_DECAY = "lfu-decay"
    """The expert with the least heat, a use count that halves as its layer runs; ties by recency."""

    LRU = "lru"
    """The expert that was used longest ago."""
