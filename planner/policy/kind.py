"""The eviction policies by name."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path


class PolicyKind(StrEnum):
    """How a victim is chosen; the values are the words that a user writes.

    Each file in `policies/` is a member, such as `lfu-decay` for `lfu_decay.py`. Only the members that our code
    names are written out.
    """

    _ignore_ = "_path"

    LFU_DECAY = "lfu-decay"
    """The expert with the least heat, a use count that halves as its layer runs; ties by recency."""

    LRU = "lru"
    """The expert that was used longest ago."""

    for _path in sorted((Path(__file__).parent / "policies").glob("[!_]*.py")):
        if _path.stem.upper() not in vars():
            vars()[_path.stem.upper()] = _path.stem.replace("_", "-")

    @property
    def module(self) -> str:
        """The name of the policy's module."""
        return f"expertier.planner.policy.policies.{self.value.replace('-', '_')}"
