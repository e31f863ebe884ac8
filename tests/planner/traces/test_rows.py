"""Rows joined: a call asks for what any of its rows asked for, and nothing else changes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertier.planner.traces.rows import join_rows
from expertier.planner.traces.trace import Phase, Trace

N_LAYERS = 2
rows_of = st.lists(
    st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True), min_size=2, max_size=2),
    max_size=7,
)


def make_trace(sequences: list[tuple[list[list[list[int]]], list[list[list[int]]]]], by_layer: bool) -> Trace:
    """A trace of (prompt, decode) rows; the prompt layer by layer or row by row."""
    calls: list[tuple[int, int, Phase, list[int]]] = []
    ends, step = [0], 0
    for prompt, decode in sequences:
        rows = [
            (step + i, layer, Phase.PREFILL, row[layer]) for i, row in enumerate(prompt) for layer in (0, 1)
        ]
        calls += sorted(rows, key=lambda call: call[1]) if by_layer else rows
        step += len(prompt)
        calls += [
            (step + i, layer, Phase.DECODE, row[layer]) for i, row in enumerate(decode) for layer in (0, 1)
        ]
        step += len(decode)
        ends.append(len(calls))
    trace = Trace(
        layer=np.array([layer for _, layer, _, _ in calls], np.int32),
        step=np.array([step for step, _, _, _ in calls], np.int64),
        phase=np.array([phase for _, _, phase, _ in calls], np.uint8),
        rows=np.ones(len(calls), np.int32),
        bounds=np.cumsum([0, *(len(e) for _, _, _, e in calls)]).astype(np.int64),
        experts=np.array([e for _, _, _, experts in calls for e in experts], np.int32),
        sequences=np.array(ends, np.int64),
        n_experts=np.full(N_LAYERS, 6, np.int32),
        blocks=np.arange(N_LAYERS, dtype=np.int32),
    )
    trace.check_valid()
    return trace


def calls_of(trace: Trace) -> list[tuple[int, int, list[int], int]]:
    """Each call as (layer, phase, experts, rows)."""
    return [
        (
            int(trace.layer[i]),
            int(trace.phase[i]),
            trace.experts[trace.bounds[i] : trace.bounds[i + 1]].tolist(),
            int(trace.rows[i]),
        )
        for i in range(trace.n_calls)
    ]


def expected(rows: list[list[list[int]]], phase: Phase, n: int) -> list[tuple[int, int, list[int], int]]:
    """Join rows by hand."""
    calls = []
    for begin in range(0, len(rows), n):
        group = rows[begin : begin + n]
        for layer in range(N_LAYERS):
            named = list(dict.fromkeys(e for row in group for e in row[layer]))
            calls.append((layer, int(phase), named, len(group)))
    return calls


@given(
    st.lists(st.tuples(rows_of, rows_of), min_size=1, max_size=3),
    st.booleans(),
    st.integers(2, 5),
    st.integers(2, 3),
)
def test_joined_rows(
    sequences: list[tuple[list[list[list[int]]], list[list[list[int]]]]],
    by_layer: bool,
    n_prefill: int,
    n_decode: int,
) -> None:
    trace = make_trace(sequences, by_layer)
    joined = join_rows(join_rows(trace, Phase.PREFILL, n_prefill), Phase.DECODE, n_decode)
    joined.check_valid()
    assert joined.n_sequences == trace.n_sequences
    for i, (prompt, decode) in enumerate(sequences):
        section = joined.section(int(joined.sequences[i]), int(joined.sequences[i + 1]))
        wanted = expected(prompt, Phase.PREFILL, n_prefill) + expected(decode, Phase.DECODE, n_decode)
        assert calls_of(section) == wanted


def test_one_row_a_step_is_the_trace_itself() -> None:
    trace = make_trace([([[[0], [1]]], [[[2], [3]]])], by_layer=True)
    assert join_rows(trace, Phase.DECODE, 1) is trace
    with pytest.raises(ValueError, match="join 0 steps"):
        join_rows(trace, Phase.DECODE, 0)
