"""Joins rows of a recording as an engine runs them: the tokens of a prompt at once, or several sequences a step."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from expertier.planner.traces.trace import Phase, Trace

I64 = npt.NDArray[np.int64]


def join_rows(trace: Trace, phase: Phase, n: int) -> Trace:
    """Return the trace with up to `n` steps of `phase` joined into one.

    Steps of `phase` that follow one another in a sequence are joined: each layer's call asks for the experts that any
    of these steps asked for, and the joined step runs layer after layer. Steps of the other phase stay as they are.
    The result has no `resident`. Raises `ValueError` for an `n` below 1.
    """
    if n < 1:
        raise ValueError(f"asked to join {n} steps: give 1 or more")
    if n == 1 or trace.n_calls == 0:
        return trace
    first, group = _groups(trace, phase, n)
    lengths = trace.lengths
    # Rows and experts of the joined call, in the order of their first mention.
    call_of = np.repeat(group, lengths)
    n_all = int(trace.n_experts.max())
    key = call_of * n_all + trace.experts
    _, mentioned = np.unique(key, return_index=True)
    mentioned = mentioned[np.lexsort((mentioned, call_of[mentioned]))]
    n_calls = len(first)
    counts = np.bincount(call_of[mentioned], minlength=n_calls)
    rows = np.zeros(n_calls, np.int64)
    np.add.at(rows, group, trace.rows)
    sequence = np.searchsorted(trace.sequences, first, side="right") - 1
    return replace(
        trace,
        layer=trace.layer[first],
        step=trace.step[first],
        phase=trace.phase[first],
        rows=rows.astype(np.int32),
        bounds=np.concatenate(([0], np.cumsum(counts))).astype(np.int64),
        experts=trace.experts[mentioned],
        sequences=np.searchsorted(sequence, np.arange(trace.n_sequences + 1)).astype(np.int64),
        resident=None,
    )


def _groups(trace: Trace, phase: Phase, n: int) -> tuple[I64, I64]:
    """Return [G], the first recorded call of each joined call, and [C], the joined call of each recorded call."""
    sequence = np.searchsorted(trace.sequences, np.arange(trace.n_calls), side="right") - 1
    change = np.flatnonzero((np.diff(sequence) != 0) | (np.diff(trace.phase) != 0)) + 1
    keys: dict[tuple[int, int, int], int] = {}
    group = np.empty(trace.n_calls, np.int64)
    first: list[int] = []
    order: list[tuple[int, int, int]] = []
    steps, layers = trace.step.tolist(), trace.layer.tolist()
    bounds = [0, *change.tolist(), trace.n_calls]
    for run, (begin, end) in enumerate(pairwise(bounds)):
        joins = trace.phase[begin] == phase
        place: dict[int, int] = {}
        for call in range(begin, end):
            if joins:
                of_run = place.setdefault(steps[call], len(place)) // n
                key = (run, of_run, layers[call])
            else:
                key = (run, call, -1)
            if key not in keys:
                keys[key] = len(first)
                first.append(call)
                order.append(key)
            group[call] = keys[key]
    # The steps of a run follow one another, and in each step the layers, from the first to the last.
    by_step = sorted(range(len(order)), key=order.__getitem__)
    number = np.empty(len(order), np.int64)
    number[by_step] = np.arange(len(order))
    return np.array(first, np.int64)[by_step], number[group]
