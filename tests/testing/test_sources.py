"""The pattern source, the synthetic table, and the clock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertier.testing import FakeClock, LayerShape, PatternSource, synthetic_table
from expertier.tiers.model.span import Span


@given(st.integers(0, 10_000), st.integers(1, 200), st.integers(0, 50), st.integers(0, 3))
def test_a_byte_depends_on_where_it_lies_and_on_nothing_else(
    offset: int, n_bytes: int, begin: int, seed: int
) -> None:
    source = PatternSource(seed)
    whole = source.expected(Span(offset, n_bytes + begin))
    part = bytearray(n_bytes)
    source.read_into(Span(offset + begin, n_bytes), memoryview(part))
    assert bytes(part) == whole[begin:]


def test_neighbours_and_seeds_differ() -> None:
    source = PatternSource()
    pieces = {source.expected(Span(offset, 64)) for offset in range(1000)}
    assert len(pieces) == 1000
    assert source.expected(Span(0, 64)) != PatternSource(1).expected(Span(0, 64))


def test_tensors_of_a_synthetic_table_do_not_overlap() -> None:
    table = synthetic_table([LayerShape(), LayerShape(6, types=("Q4_0", "Q4_0", "Q8_0"))], top_k=3)
    ends = [0]
    for begin, end in table.expert_ranges:
        assert begin >= ends[-1]
        ends.append(end)
    assert ends[-1] <= table.file_bytes
    assert [layer.n_experts for layer in table.layers] == [8, 6]
    assert table.slot_layouts[1].stride == 0, "these types need an array a matrix"


def test_the_clock_goes_on_when_it_is_told_to() -> None:
    clock = FakeClock(5.0)
    clock.advance(2.5)
    assert clock() == 7.5
    with pytest.raises(ValueError, match="cannot pass"):
        clock.advance(-1)
