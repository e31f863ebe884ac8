"""How much a miss of each layer costs an engine, as a basis for distributing slots over the layers."""

from __future__ import annotations

from typing import Protocol

_ENOUGH = 256
"""How many missing experts must have been counted before the share of those that come in time means anything."""


class LookAheadCounts(Protocol):
    """What the proxy has counted about experts that were fetched before a layer asked for them."""

    @property
    def missing(self) -> int:
        """Experts that a layer asked for and that were in no slot when the prediction was made."""

    @property
    def prefetch_layers(self) -> int:
        """How many layers ahead experts are predicted; 0 where nothing is predicted."""

    @property
    def prefetches_in_time(self) -> int:
        """How many of the missing experts were fetched before the layer asked for them."""


def miss_costs(n_layers: int, counts: LookAheadCounts) -> list[float]:
    """Return what a miss of each layer costs, as a fraction of what a miss costs that the engine waits for.

    The first layers have no layer far enough before them to predict from, so they wait for every miss. Some of the
    experts that later layers miss come in time.
    """
    hidden = 0.0
    if counts.prefetch_layers > 0 and counts.missing >= _ENOUGH:
        hidden = min(counts.prefetches_in_time / counts.missing, 1.0)
    return [1.0 if layer < counts.prefetch_layers else 1.0 - hidden for layer in range(n_layers)]
