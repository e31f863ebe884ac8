"""Launches of moves that keep the order of what they move, as a slab's pieces do: found without comparing rows.

What moves up comes from the highest down, what moves down from the lowest up, and no piece passes another. Then a
piece that moves up never touches one that moves down, and waits only for pieces above it, whose places it takes.
So a launch goes on until a target reaches a source of the same launch. Where a slab shrinks evenly, each launch is
about twice as long as the one before it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from expertier.hip.device import Moves

_FEW = 32
"""Launches up to which nobody looks for fewer."""

_Numbers = npt.NDArray[np.int64]


def ordered_launches(rows: Moves) -> tuple[Moves, tuple[int, ...]] | None:
    """Return the rows by launches, and where each launch ends; None where the rows do not keep their order.

    `rows` (target, source, bytes), int64 [rows, 3], are to look as if done one after another, and none overlaps
    itself.
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
    """Return the rows in pieces of `steps[row]` bytes, in the order that leaves every source intact until it is read.

    A piece is as long as its step, or shorter at the row's end; the rows stay in their order.
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
    """Whether targets and sources both lie one above the other, in the order of the rows."""
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
    """Return where each launch ends, of pieces that move towards smaller numbers, the smallest first."""
    # Quick, and mostly as good: a launch ends before the first target that is not wholly below its first source.
    ends = [0]
    while ends[-1] < len(targets) and len(ends) <= _FEW:
        ends.append(int(np.searchsorted(target_ends, sources[ends[-1]], side="right")))
    if ends[-1] == len(targets):
        return tuple(ends[1:])
    # Where pieces land in gaps between sources, that would be many launches: look at what they overlap.
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
    """Have both directions share their launches: they do not touch each other."""
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
