"""What a miss of each layer costs an engine, as a basis for sharing out slots."""

from __future__ import annotations

from typing import Protocol

_ENOUGH = 256
"""Missing experts that are needed to tell how many of them come in time."""


class LookAheadCounts(Protocol):
    """What the proxy has counted of experts that were fetched before they were asked for."""

    @property
    def missing(self) -> int:
        """Experts asked for that were in no slot when they could be foretold."""

    @property
    def prefetch_layers(self) -> int:
        """How many layers ahead experts are foretold; 0 where none are."""

    @property
    def prefetches_in_time(self) -> int:
        """How many of them were fetched before a layer asked for them."""


def miss_costs(n_layers: int, counts: LookAheadCounts) -> list[float]:
    """Return what a miss of each layer costs, in terms of one that is waited for.

    The first layers have no layer far enough before them, so they wait for every miss; of the misses of later layers
    some come in time.
    """
    hidden = 0.0
    if counts.prefetch_layers > 0 and counts.missing >= _ENOUGH:
        hidden = min(counts.prefetches_in_time / counts.missing, 1.0)
    return [1.0 if layer < counts.prefetch_layers else 1.0 - hidden for layer in range(n_layers)]
