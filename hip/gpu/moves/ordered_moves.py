"""Divides moves into launches without comparing all rows, for pieces that keep their order, as a slab's pieces do.

The rows must come in this order: pieces that move up from the highest to the lowest, pieces that move down from the
lowest to the highest. As no piece passes another, a piece that moves up never touches a piece that moves down, and
waits only for pieces above it, whose places it takes. The same holds, mirrored, for pieces that move down. So a launch
can take rows until a target would reach a source of the same launch. Where a slab shrinks evenly, each launch has about
twice as many rows as the launch before it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from expertier.hip.device import Moves

_FEW = 32
"""Up to so many launches the quick division is used, and no better one is looked for."""

_Numbers = npt.NDArray[np.int64]


def ordered_launches(rows: Moves) -> tuple[Moves, tuple[int, ...]] | None:
    """Return the rows sorted by launch, and the index at which each launch ends.

    Returns None where the rows are not in the order that the module's docstring describes. `rows` are (target, source,
    bytes), int64 [rows, 3], and no row's target overlaps its own source. The launches have the same result as the rows
    done one after another.
    """
    up = rows[:, 0] > rows[:, 1]
    ups, downs = (rows, rows[:0]) if up.all() else (rows[up], rows[~up])
    if not (_ascending(ups[::-1]) and _ascending(downs)):
        return None
    if not len(downs):
        return ups, _ends_up(ups)
    if not len(ups):
        return downs, _ends_down(downs)
    joined = np.concatenate([ups[::-1], downs])
    if not _ascending(joined[np.argsort(joined[:, 1], kind="stable")]):
        return None
    return _side_by_side(ups, _ends_up(ups), downs, _ends_down(downs))


def cut(rows: Moves, steps: Moves) -> Moves:
    """Cut each row into pieces of `steps[row]` bytes, ordered so that no piece overwrites a source before its read.

    The last piece of a row may be shorter. The rows stay in their order.
    """
    counts = -(-rows[:, 2] // steps)
    row = np.repeat(np.arange(len(rows)), counts)
    number = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    number = np.where((rows[:, 0] > rows[:, 1])[row], counts[row] - 1 - number, number)
    begins = number * steps[row]
    pieces = rows[row]
    pieces[:, 0] += begins
    pieces[:, 1] += begins
    pieces[:, 2] = np.minimum(steps[row], pieces[:, 2] - begins)
    return pieces


def _ascending(rows: Moves) -> bool:
    """Whether both targets and sources rise from row to row, without overlaps."""
    targets, sources, sizes = rows.T
    gaps = (targets[1:] - targets[:-1] >= sizes[:-1], sources[1:] - sources[:-1] >= sizes[:-1])
    return bool(gaps[0].all() and gaps[1].all())


def _ends_up(rows: Moves) -> tuple[int, ...]:
    targets, sources, sizes = rows.T
    return _ends(-targets, -(targets + sizes), -sources, -(sources + sizes))


def _ends_down(rows: Moves) -> tuple[int, ...]:
    targets, sources, sizes = rows.T
    return _ends(targets + sizes, targets, sources + sizes, sources)


def _ends(
    target_ends: _Numbers, targets: _Numbers, source_ends: _Numbers, sources: _Numbers
) -> tuple[int, ...]:
    """Return the index at which each launch ends, for pieces that move towards smaller numbers, the smallest first."""
    # Quick and mostly as good: a launch ends before the first target not wholly below the launch's first source.
    ends = [0]
    while ends[-1] < len(targets) and len(ends) <= _FEW:
        ends.append(int(np.searchsorted(target_ends, sources[ends[-1]], side="right")))
    if ends[-1] == len(targets):
        return tuple(ends[1:])
    # Where pieces land in gaps between sources, that gives many launches, so look at which sources a target overlaps.
    last = np.searchsorted(sources, target_ends, side="left") - 1
    waits = np.where(last >= np.searchsorted(source_ends, targets, side="right"), last, -1)
    waits = np.maximum.accumulate(waits)
    ends = [0]
    while ends[-1] < len(waits):
        ends.append(int(np.searchsorted(waits, ends[-1], side="left")))
    return tuple(ends[1:])


def _side_by_side(
    ups: Moves, ends_up: tuple[int, ...], downs: Moves, ends_down: tuple[int, ...]
) -> tuple[Moves, tuple[int, ...]]:
    """Merge the launches of both directions, whose pieces do not touch each other; return rows and ends."""
    n_launches = max(len(ends_up), len(ends_down))
    launches = np.concatenate(
        [
            np.repeat(np.arange(len(ends)), np.diff(np.asarray(ends), prepend=0))
            for ends in (ends_up, ends_down)
        ]
    )
    order = np.argsort(launches, kind="stable")
    ends = np.cumsum(np.bincount(launches, minlength=n_launches))
    return np.concatenate([ups, downs])[order], tuple(ends.tolist())
