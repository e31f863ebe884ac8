"""Divides moves into as few launches as possible, with the same result as the moves done one after another.

The pieces of one launch are copied at the same time, so they must be independent. A row must wait for an earlier row
where it writes bytes that the earlier row reads or writes, or reads bytes that the earlier row writes. All moves of the
tiers keep the order of the pieces, and are divided in one pass (`ordered_moves.py`): when a slab shrinks to half and
the surviving experts move up, 4,096 experts take 15 launches. Other rows get levels: a row's level is one more than the
highest level of the rows that it waits for, and each level is a launch.

Where that gives many small launches, as when slots shift by less than a slot, pieces go through scratch memory instead:
one launch copies them there, a second one to their targets, as often as the number of bytes demands.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from expertier.hip.device import Moves
from expertier.hip.gpu.moves.ordered_moves import cut, ordered_launches
from expertier.units import MIB

PIECE_BYTES = MIB
"""The longest piece of a launch.

A launch has as many blocks of threads for each piece as the longest piece needs, so one long piece among short pieces
would leave most blocks without work.
"""

_MOST_PIECES = 16
"""Rows that overlap themselves are cut into pieces. Above this many times more pieces, scratch is used instead."""

_MANY_LEVELS = 3
"""Scratch doubles the traffic, so it is used only where it takes less than a third of the launches."""

_PAIRS_AT_ONCE = 1 << 20
_ALIGNMENT = 16

_Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Scratch:
    """Device memory in which a plan may put pieces on their way to their targets."""

    address: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class MovePlan:
    """Rows (target, source, bytes), int64 [rows, 3], sorted by launch, and the index at which each launch ends.

    The rows of one launch are independent. `uses_scratch` says whether any row touches the scratch memory.
    """

    rows: Moves
    ends: tuple[int, ...]
    uses_scratch: bool

    def launches(self) -> list[Moves]:
        """Return the rows of each launch."""
        return np.split(self.rows, self.ends[:-1]) if self.ends else []


def plan_moves(moves: Moves, scratch: Scratch) -> MovePlan:
    """Plan moves, rows of (target, source, bytes). Raises `ValueError` for a negative size or another shape."""
    rows = _checked(moves)
    if not len(rows):
        return MovePlan(rows, (), False)
    pieces = _cut_self_overlaps(rows)
    in_order = None
    if pieces is not None:
        in_order = ordered_launches(pieces)
        ordered, ends = in_order or _by_level(pieces)
        through_scratch = 2 * -(-int(rows[:, 2].sum()) // scratch.n_bytes)
        if len(ends) <= max(2, _MANY_LEVELS * through_scratch):
            return MovePlan(*_short_pieces(ordered, ends), False)
    through, ends = _through_scratch(rows, scratch, apart=in_order is not None)
    return MovePlan(*_short_pieces(through, ends), True)


def plan_in_order(moves: Moves, scratch: Scratch) -> MovePlan:
    """Plan one launch for each row, for copies that the driver does one after another."""
    rows = _checked(moves)
    parts: list[Moves] = []
    uses_scratch = False
    for row in rows:
        pieces = _cut_self_overlaps(row[None, :])
        if pieces is None:
            pieces, _ = _through_scratch(row[None, :], scratch, apart=True)
            uses_scratch = True
        parts.append(pieces)
    joined = np.concatenate(parts) if parts else rows
    return MovePlan(joined, tuple(range(1, len(joined) + 1)), uses_scratch)


def _checked(moves: Moves) -> Moves:
    rows = np.asarray(moves, dtype=np.int64)
    if rows.ndim != 2 or rows.shape[1] != 3:
        raise ValueError(f"moves are rows of (target, source, bytes), got an array of shape {rows.shape}")
    if (rows[:, 2] < 0).any():
        raise ValueError(f"got a move of {rows[:, 2].min()} bytes: give 0 or more")
    moved = (rows[:, 2] > 0) & (rows[:, 0] != rows[:, 1])
    return rows if moved.all() else rows[moved]


def _cut_self_overlaps(rows: Moves) -> Moves | None:
    """Cut rows whose target overlaps their source into pieces that do not; return None where there are too many."""
    steps = np.minimum(np.abs(rows[:, 0] - rows[:, 1]), rows[:, 2])
    if (steps == rows[:, 2]).all():
        return rows
    n_pieces = int((-(-rows[:, 2] // steps)).sum())
    if n_pieces > _MOST_PIECES * int((-(-rows[:, 2] // PIECE_BYTES)).sum()):
        return None
    return cut(rows, steps)


def _short_pieces(rows: Moves, ends: tuple[int, ...]) -> tuple[Moves, tuple[int, ...]]:
    """Cut long rows into equal pieces at multiples of a vector; the pieces of a row stay in the row's launch."""
    counts = -(-rows[:, 2] // PIECE_BYTES)
    if (counts <= 1).all():
        return rows, ends
    steps = -(-rows[:, 2] // (counts * _ALIGNMENT)) * _ALIGNMENT
    n_pieces = np.cumsum(-(-rows[:, 2] // steps))
    return cut(rows, steps), tuple(n_pieces[np.asarray(ends) - 1].tolist())


def _by_level(rows: Moves) -> tuple[Moves, tuple[int, ...]]:
    """Return the rows sorted by level, and the index at which each level ends, for rows in any order."""
    level = [0] * len(rows)
    later, earlier = _conflicts(rows, reads_count=True)
    for j, i in zip(later.tolist(), earlier.tolist(), strict=True):
        if level[i] >= level[j]:
            level[j] = level[i] + 1
    return rows[np.argsort(level, kind="stable")], tuple(np.cumsum(np.bincount(level)).tolist())


def _conflicts(rows: Moves, *, reads_count: bool) -> tuple[_Numbers, _Numbers]:
    """Return pairs (later row, earlier row that it must wait for), sorted by the later row.

    Without `reads_count`, a row need not wait for an earlier row that only reads what the later row writes.
    """
    targets, sources, sizes = rows.T
    found = []
    if reads_count:
        found.append(_overlaps(targets, sources, sizes))
    found.append(_overlaps(sources, targets, sizes))
    ordered = np.sort(targets)
    if (ordered[1:] < (targets + sizes)[np.argsort(targets, kind="stable")][:-1]).any():
        found.append(_overlaps(targets, targets, sizes))
    later = np.concatenate([pair[0] for pair in found])
    earlier = np.concatenate([pair[1] for pair in found])
    order = np.argsort(later, kind="stable")
    return later[order], earlier[order]


def _overlaps(a: _Numbers, b: _Numbers, sizes: _Numbers) -> tuple[_Numbers, _Numbers]:
    """Return all pairs (j, i) with i < j where piece j, at `a[j]`, and piece i, at `b[i]`, share bytes."""
    order = np.argsort(b, kind="stable")
    begins = b[order]
    # A piece that begins more than the longest piece's size before `a` cannot reach it.
    low = np.searchsorted(begins, a - sizes.max(), side="right")
    high = np.searchsorted(begins, a + sizes, side="left")
    counts = np.maximum(high - low, 0)
    empty = np.empty(0, dtype=np.int64)
    later, earlier = [empty], [empty]
    for rows in np.split(np.arange(len(a)), np.flatnonzero(np.diff(np.cumsum(counts) // _PAIRS_AT_ONCE)) + 1):
        n = counts[rows]
        j = np.repeat(rows, n)
        places = np.arange(n.sum()) - np.repeat(np.cumsum(n) - n, n) + np.repeat(low[rows], n)
        i = order[places]
        hits = (i < j) & (b[i] + sizes[i] > a[j]) & (b[i] < a[j] + sizes[j])
        later.append(j[hits])
        earlier.append(i[hits])
    return np.concatenate(later), np.concatenate(earlier)


def _through_scratch(rows: Moves, scratch: Scratch, *, apart: bool) -> tuple[Moves, tuple[int, ...]]:
    """Plan batches of two launches: one copies pieces into scratch, the next one copies them to their targets.

    `apart` says that no row touches bytes that an earlier row writes. Returns the rows, and the index at which each
    launch ends.
    """
    largest = scratch.n_bytes - 2 * _ALIGNMENT
    if (rows[:, 2] > largest).any():
        rows = cut(rows, np.minimum(rows[:, 2], largest))
    waits = [-1] * len(rows)
    if not apart:
        # Within a batch all sources are read before any target is written, so only earlier writes matter.
        later, earlier = _conflicts(rows, reads_count=False)
        for j, i in zip(later.tolist(), earlier.tolist(), strict=True):
            waits[j] = max(waits[j], i)
    parts: list[Moves] = []
    ends: list[int] = []
    offsets: list[int] = []
    begin, used = 0, 0

    def flush(end: int) -> None:
        batch = rows[begin:end]
        held = scratch.address + np.asarray(offsets, dtype=np.int64)
        parts.append(np.stack([held, batch[:, 1], batch[:, 2]], axis=1))
        parts.append(np.stack([batch[:, 0], held, batch[:, 2]], axis=1))
        n = end - begin
        ends.extend((2 * begin + n, 2 * end))

    for j, (_, source, n_bytes) in enumerate(rows.tolist()):
        # In scratch a piece has the same offset within a vector as at its source, so that vectors can be copied.
        offset = -(-used // _ALIGNMENT) * _ALIGNMENT + (source - scratch.address) % _ALIGNMENT
        if j > begin and (waits[j] >= begin or offset + n_bytes > scratch.n_bytes):
            flush(j)
            begin, offsets = j, []
            offset = (source - scratch.address) % _ALIGNMENT
        offsets.append(offset)
        used = offset + n_bytes
    flush(len(rows))
    return np.concatenate(parts), tuple(ends)
