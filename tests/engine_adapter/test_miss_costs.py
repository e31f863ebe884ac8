"""What a miss costs, by how many come in time."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from expertier.engine_adapter.miss_costs import miss_costs


@dataclass(frozen=True)
class Counts:
    missing: int
    prefetches_in_time: int


@pytest.mark.parametrize(
    ("layers_ahead", "counts", "expected"),
    [
        (0, Counts(10_000, 5_000), [1, 1, 1, 1]),
        (1, Counts(10_000, 4_000), [1, 0.6, 0.6, 0.6]),
        (2, Counts(10_000, 4_000), [1, 1, 0.6, 0.6]),
        (2, Counts(100, 100), [1, 1, 1, 1]),
        (2, Counts(1_000, 2_000), [1, 1, 0, 0]),
    ],
)
def test_the_first_layers_wait_for_every_miss(layers_ahead, counts, expected):
    assert miss_costs(4, layers_ahead, counts) == pytest.approx(expected)
