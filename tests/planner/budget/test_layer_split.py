"""Which blocks lie on which device: llama.cpp's arithmetic, and the choice by room against every other choice."""

from __future__ import annotations

from itertools import combinations
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertier.errors import ConfigError
from expertier.planner.budget.demand import LayerDemand
from expertier.planner.budget.layer_split import BlockNeeds, units_by_room, units_of_shares


def as_llama_cpp(shares: list[float], n_units: int) -> tuple[int, ...]:
    """llama.cpp's own loops (llama-model.cpp, load_tensors), unit by unit, in single precision."""
    splits, total = [], np.float32(0)
    for share in shares:
        total = np.float32(total + np.float32(share))
        splits.append(total)
    splits = [np.float32(split / total) for split in splits]
    owners = []
    for unit in range(n_units):
        place = np.float32(np.float32(unit) / np.float32(n_units))
        owners.append(next(i for i, split in enumerate(splits) if split > place))
    return tuple(owners.count(i) for i in range(len(shares)))


@given(
    st.lists(st.floats(0, 1e6, width=32), min_size=1, max_size=8).filter(lambda shares: sum(shares) > 1e-3),
    st.integers(1, 400),
)
def test_shares_are_read_as_llama_cpp_reads_them(shares, n_units):
    assert units_of_shares(shares, n_units) == as_llama_cpp(shares, n_units)


@given(st.lists(st.integers(0, 300), min_size=1, max_size=8).filter(any))
def test_whole_numbers_of_units_are_placed_exactly(units):
    """What is handed to llama.cpp: whatever their number, each device gets the units that it is to have."""
    assert units_of_shares(units, sum(units)) == tuple(units)
    assert as_llama_cpp(units, sum(units)) == tuple(units)


def _demand(n_experts: int, slot_bytes: int, fixed_bytes: int) -> LayerDemand:
    return LayerDemand(0, n_experts, 1, slot_bytes, fixed_bytes)


DEMANDS = st.builds(_demand, st.integers(1, 8), st.integers(1, 20), st.integers(0, 5))
BLOCKS = st.lists(st.builds(BlockNeeds, st.integers(0, 50), st.none() | DEMANDS), min_size=3, max_size=9)


def worst(rooms: list[int], blocks: list[BlockNeeds], output: int, units: tuple[int, ...]) -> float:
    """How well off the device is that is worst off, counted block by block."""
    found, begin = inf, 0
    for i, room in enumerate(rooms):
        last = i == len(rooms) - 1
        mine = blocks[begin : begin + units[i] - last]
        begin += len(mine)
        demands = [block.demand for block in mine if block.demand is not None]
        if not demands:
            return -inf
        left = room - sum(block.fixed_bytes for block in mine) - (output if last else 0)
        floor = sum(demand.bytes_for(1) for demand in demands)
        full = sum(demand.bytes_for(demand.n_experts) for demand in demands)
        if left < floor:
            found = min(found, left - floor)
        else:
            found = min(found, left / full if left < full else 1 + (left - full) / max(room, 1))
    return found


@given(BLOCKS, st.lists(st.integers(0, 600), min_size=2, max_size=3), st.integers(0, 60))
def test_no_other_split_leaves_the_worst_device_better_off(blocks, rooms, output):
    n_layers = sum(block.demand is not None for block in blocks)
    if n_layers < len(rooms):
        with pytest.raises(ConfigError, match="give fewer"):
            units_by_room(rooms, blocks, output)
        return
    units = units_by_room(rooms, blocks, output)
    assert sum(units) == len(blocks) + 1
    others = [
        tuple(b - a for a, b in zip((0, *cuts), (*cuts, len(blocks) + 1), strict=True))
        for cuts in combinations(range(1, len(blocks)), len(rooms) - 1)
    ]
    assert worst(rooms, blocks, output, units) == max(worst(rooms, blocks, output, other) for other in others)


def test_a_smaller_device_gets_less():
    blocks = [BlockNeeds(10, LayerDemand(i, 8, 2, 10, 0)) for i in range(12)]
    assert units_by_room([600, 300], blocks, 0) == (8, 5)
    assert units_by_room([300, 600], blocks, 0) == (4, 9)
    assert units_by_room([500, 500], blocks, 0) == (6, 7)
    assert units_by_room([500, 500], blocks, 200)[0] > 6, "the output takes of the last one"
