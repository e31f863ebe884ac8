"""Which blocks of a model lie on which of several devices: each has a stretch, as llama.cpp's layer split places them.

llama.cpp places units: the blocks, and after them the output. Here the output lies on the last device.

    blocks  0 1 2 3 4 5 │ 6 7 8 9 output      units (6, 5)
            └─ first ─┘   └── second ──┘
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf

import numpy as np

from expertier.errors import ConfigError
from expertier.planner.budget.demand import LayerDemand


@dataclass(frozen=True, slots=True)
class BlockNeeds:
    """What one block takes of its device: `fixed_bytes`, and slots where the block has experts."""

    fixed_bytes: int
    demand: LayerDemand | None = None


def units_of_shares(shares: Sequence[float], n_units: int) -> tuple[int, ...]:
    """Return how many units llama.cpp gives each device for these shares (its `--tensor-split`).

    The arithmetic is llama.cpp's own, in single precision, so that the same shares place the same blocks. `shares` are
    0 or more, and not all of them are 0.
    """
    points = np.cumsum(np.array(shares, np.float32), dtype=np.float32)
    points /= points[-1]
    places = np.arange(n_units, dtype=np.float32) / np.float32(n_units)
    owners = np.searchsorted(points, places, side="right")
    return tuple(np.bincount(owners, minlength=len(shares)).tolist())


def units_by_room(rooms: Sequence[int], blocks: Sequence[BlockNeeds], output_bytes: int) -> tuple[int, ...]:
    """Return how many units each device gets, so that the smallest share of experts in slots on any device is largest.

    `rooms` are the bytes that each device has for blocks and their experts, and `output_bytes` are what the output
    takes of the last device. Where all experts fit, the smallest part of a room that is left over is made as large as
    possible. A split is returned even where some device has no room for a slot in each of its layers: then it is the
    split that lacks the fewest bytes. Raises `ConfigError` where there are more devices than blocks with experts.
    """
    n_blocks, n_devices = len(blocks), len(rooms)
    n_layers = sum(block.demand is not None for block in blocks)
    if n_devices > n_layers:
        raise ConfigError(f"{n_devices} devices for {n_layers} layers with experts: give fewer")
    sums = _Sums(blocks)
    best = [-inf] * (n_blocks + 1)  # best[end]: the best score of blocks [0, end) on the devices so far
    best[0] = inf
    began: list[list[int]] = []
    for device, room in enumerate(rooms):
        is_last = device == n_devices - 1
        found, begins = [-inf] * (n_blocks + 1), [0] * (n_blocks + 1)
        for end in [n_blocks] if is_last else range(1, n_blocks):
            for begin in range(end):
                worst = min(best[begin], sums.score(room - output_bytes * is_last, room, begin, end))
                if worst > found[end]:
                    found[end], begins[end] = worst, begin
        best = found
        began.append(begins)
    units, end = [], n_blocks
    for begins in reversed(began):
        units.append(end - begins[end])
        end = begins[end]
    units[0] += 1  # the output
    return tuple(reversed(units))


class _Sums:
    """Sums over stretches of blocks."""

    def __init__(self, blocks: Sequence[BlockNeeds]) -> None:
        demands = [block.demand for block in blocks]
        self._fixed = [0, *accumulate(block.fixed_bytes for block in blocks)]
        self._floor = [0, *accumulate(0 if each is None else each.bytes_for(1) for each in demands)]
        self._full = [
            0,
            *accumulate(0 if each is None else each.bytes_for(each.n_experts) for each in demands),
        ]

    def score(self, left: int, room: int, begin: int, end: int) -> float:
        """Return how well blocks [begin, end) fit into `left` bytes of a device's `room`.

        Below 0: the bytes that a slot a layer lacks; up to 1: the share of the experts that have slots; above: what is
        left over.
        """
        floor, full = self._floor[end] - self._floor[begin], self._full[end] - self._full[begin]
        if not floor:
            return -inf  # no experts: the device would have no tiers
        left -= self._fixed[end] - self._fixed[begin]
        if left < floor:
            return left - floor
        return left / full if left < full else 1 + (left - full) / max(room, 1)
