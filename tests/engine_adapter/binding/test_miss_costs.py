"""What a miss costs, by how many come in time."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from expertier.engine_adapter.binding.miss_costs import miss_costs


@dataclass(frozen=True)
class Counts:
    prefetch_layers: int
    missing: int
    prefetches_in_time: int


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        (Counts(0, 10_000, 5_000), [1, 1, 1, 1]),
        (Counts(1, 10_000, 4_000), [1, 0.6, 0.6, 0.6]),
        (Counts(2, 10_000, 4_000), [1, 1, 0.6, 0.6]),
        (Counts(2, 100, 100), [1, 1, 1, 1]),
        (Counts(2, 1_000, 2_000), [1, 1, 0, 0]),
    ],
)
def test_the_first_layers_wait_for_every_miss(counts, expected):
    assert miss_costs(4, counts) == pytest.approx(expected)
