"""What a replay counted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """One policy's counts over a trace. Bytes are None where the trace does not say how large an expert is."""

    policy: str
    lookups: int
    misses: int
    decode_lookups: int
    decode_misses: int
    evictions: int
    """Experts that left L1."""
    pool_hits: int
    """Misses of L1 that a copy in L2 served."""
    pool_evictions: int
    bytes_in: int | None
    """Bytes that came into L1: the sum of the two fields below."""
    bytes_l2_to_l1: int | None
    """Bytes of the experts in `pool_hits`."""
    bytes_file_to_l2: int | None
    """Bytes of all other misses: from the file through a block of L2, where they stay if there is room, into L1."""
    seconds: float
    """The time in the compiled loop alone."""

    @property
    def hits(self) -> int:
        """Return the look-ups that found their expert in L1."""
        return self.lookups - self.misses

    @property
    def hit_rate(self) -> float | None:
        """Return hits / look-ups; None without look-ups."""
        return rate(self.lookups, self.misses)

    @property
    def decode_hit_rate(self) -> float | None:
        """Return the hit rate of decode alone; None without decode."""
        return rate(self.decode_lookups, self.decode_misses)

    @property
    def prefill_hit_rate(self) -> float | None:
        """Return the hit rate of prefill alone; None without prefill."""
        return rate(self.lookups - self.decode_lookups, self.misses - self.decode_misses)

    @property
    def lookups_per_s(self) -> float | None:
        """Return look-ups a second of the loop; None where it took no time."""
        return self.lookups / self.seconds if self.seconds > 0 else None

    def as_dict(self, gap_closed: float | None) -> dict[str, Any]:
        """Return all counts by name, for `--json`."""
        return {
            "policy": self.policy,
            "lookups": self.lookups,
            "hits": self.hits,
            "misses": self.misses,
            "hit_rate": self.hit_rate,
            "decode_hit_rate": self.decode_hit_rate,
            "prefill_hit_rate": self.prefill_hit_rate,
            "bytes_in": self.bytes_in,
            "bytes_l2_to_l1": self.bytes_l2_to_l1,
            "bytes_file_to_l2": self.bytes_file_to_l2,
            "evictions": self.evictions,
            "l2_hits": self.pool_hits,
            "l2_evictions": self.pool_evictions,
            "gap_closed": gap_closed,
            "lookups_per_s": self.lookups_per_s,
        }


def rate(lookups: int, misses: int) -> float | None:
    """Return the share of hits; None without look-ups."""
    return (lookups - misses) / lookups if lookups else None


def gap_closed(lru_misses: int, misses: int, optimum_misses: int) -> float | None:
    """Return how much of the way from LRU to the optimum a policy goes: 0 as LRU, 1 as the optimum, below 0 worse.

    None where LRU is as good as the optimum.
    """
    gap = lru_misses - optimum_misses
    return (lru_misses - misses) / gap if gap else None
