"""Next use: the expert leaves first whose next use a linear model, learned as the layer runs, expects last."""

from __future__ import annotations

import os

import numpy as np

from expertier.planner.policy import begin_for
from expertier.planner.tables import I32, I64, SLOT_BITS, LayerView, array_at, compiled

HEAT_PER_USE = 16
HEAT_LIMIT = 255
CALLS_PER_HALVING = 20

MOST_ASKED = 16
ONE = 1 << 14
_LIMIT = 2 * ONE - 1

_RECENT = 3
_WEIGHT_BITS = 12
LEARN_EVERY = 4


def _e(name, default):
    return int(os.environ.get(name, default))


PAIRS = _e("PAIRS", 1)
ROWS = _e("ROWS", 4)
STEP = _e("STEP", 8)
PSTEP = _e("PSTEP", STEP)
LOOK_AHEAD = _e("LA", 8)
_LEARN_BITS = _e("LB", 7)
GK = _e("GK", 2)
LAG = _e("LAG", 0)
DYN = _e("DYN", 0)
BLEND = _e("BLEND", 0)

# Notes of a layer.
_SINCE = 0
_WEIGHTS = 1
_HEAD = 8

_USE_BITS = 28
_LAST_USE = (1 << _USE_BITS) - 1


@compiled
def padded(n_experts: int) -> int:
    return (n_experts + 15) // 16 * 16


def n_notes(n_experts: int) -> int:
    n = padded(n_experts)
    return (
        _HEAD
        + 3 * n  # averages
        + n // 2
        + LOOK_AHEAD * (1 + MOST_ASKED)  # who was asked for
        + LOOK_AHEAD * n // 2  # what was said less what came
        + LOOK_AHEAD // LEARN_EVERY * 2 * n // 2
        + n * n // 2 * (1 + LAG)
        + ROWS * n * n // 2
    )


@compiled
def _add_row(total, row):
    for x in range(len(total)):
        total[x] += row[x]


@compiled
def _learn_row(row, change):
    for x in range(len(change)):
        row[x] = ((int(row[x]) + int(change[x]) + 32768) & 65535) - 32768


@compiled
def pair_row(p, q, rows):
    low = min(p, q)
    high = max(p, q)
    return ((low * 0x9E37 + high * 0x85EB) >> 3) % rows


@compiled
def step(view: LayerView, experts: I32, n: int, n_missing: int, now: int) -> None:
    n_experts = len(view.heat)
    width = padded(n_experts)
    notes = view.notes
    base = notes.ctypes.data
    at = base + _HEAD * 4
    recent = array_at(at, width, np.int32)
    at += width * 4
    last = array_at(at, width, np.int32)
    at += width * 4
    total = array_at(at, width, np.int32)
    at += width * 4
    change = array_at(at, width, np.int16)
    at += width * 2
    asked_at = at
    at += LOOK_AHEAD * (1 + MOST_ASKED) * 4
    errors_at = at
    at += LOOK_AHEAD * width * 2
    seen_at = at
    at += LOOK_AHEAD // LEARN_EVERY * 2 * width * 2
    follows = at
    at += width * width * 2
    lagged = at
    at += width * width * 2 * LAG
    pairs = at
    n_rows = ROWS * width
    row_bytes = width * 2

    if now == 1:
        notes[_WEIGHTS] = 2048
        notes[_WEIGHTS + 1] = 2048

    since = int(notes[_SINCE]) + 1
    if since >= CALLS_PER_HALVING:
        for x in range(n_experts):
            view.heat[x] >>= 1
        since = 0
    notes[_SINCE] = since
    for x in range(width):
        recent[x] -= recent[x] >> _RECENT

    call = now & 0x7FFFFFFF
    fading = max(ONE - ONE * n // (GK * len(view.owner)), ONE >> 1)
    for i in range(n):
        x = int(experts[i])
        age = (call - int(last[x])) & 0x7FFFFFFF
        near = ONE
        for back in range(1, min(age, LOOK_AHEAD, now - 1) + 1):
            past = array_at(errors_at + ((call - back) % LOOK_AHEAD) * row_bytes, width, np.int16)
            past[x] = min(int(past[x]) + near, 32767)
            near = near * fading >> 14
        last[x] = call
        if age > 0:
            recent[x] += 1 << (20 - _RECENT)

    turn = call % LOOK_AHEAD
    error = array_at(errors_at + turn * row_bytes, width, np.int16)
    of_turn = array_at(asked_at + turn * (1 + MOST_ASKED) * 4, 1 + MOST_ASKED, np.int32)
    before = array_at(
        asked_at + ((turn + LOOK_AHEAD - 1) % LOOK_AHEAD) * (1 + MOST_ASKED) * 4, 1 + MOST_ASKED, np.int32
    )
    after_then = array_at(
        asked_at + ((turn + 1) % LOOK_AHEAD) * (1 + MOST_ASKED) * 4, 1 + MOST_ASKED, np.int32
    )
    n_then = int(of_turn[0])
    learns = turn % LEARN_EVERY == 0
    snap = array_at(seen_at + (turn // LEARN_EVERY) * 2 * row_bytes, 2 * width, np.int16)
    stp = STEP
    pst = PSTEP
    if DYN:
        if len(view.owner) > DYN * n:
            stp += 1
            pst += 1
    if n_then > 0:
        half = 1 << (stp - 1)
        for x in range(width):
            change[x] = (int(error[x]) + half) >> stp
        for i in range(n_then):
            _learn_row(array_at(follows + int(of_turn[1 + i]) * row_bytes, width, np.int16), change)
        if PAIRS == 1:
            if pst != stp:
                half = 1 << (pst - 1)
                for x in range(width):
                    change[x] = (int(error[x]) + half) >> pst
            for i in range(n_then):
                for j in range(i):
                    row = pair_row(int(of_turn[1 + i]), int(of_turn[1 + j]), n_rows)
                    _learn_row(array_at(pairs + row * row_bytes, width, np.int16), change)
        if LAG:
            # the call after `then` has it as its predecessor
            nxt = array_at(errors_at + ((turn + 1) % LOOK_AHEAD) * row_bytes, width, np.int16)
            half = 1 << (stp - 1)
            for x in range(width):
                change[x] = (int(nxt[x]) + half) >> stp
            for i in range(n_then):
                _learn_row(array_at(lagged + int(of_turn[1 + i]) * row_bytes, width, np.int16), change)
        if learns:
            for q in range(2):
                gradient = 0
                for x in range(width):
                    gradient += int(error[x]) * int(snap[q * width + x])
                moved = int(notes[_WEIGHTS + q]) + (gradient // n_then >> (14 + 15 - _WEIGHT_BITS + _LEARN_BITS))
                notes[_WEIGHTS + q] = min(max(moved, -4 * ONE), 4 * ONE)

    w0 = int(notes[_WEIGHTS])
    w1 = int(notes[_WEIGHTS + 1])
    for x in range(n_experts):
        total[x] = (w0 * (int(recent[x]) >> 6) >> 12) + (w1 * (int(view.heat[x]) << 6) >> 12)
    n_now = n if n <= MOST_ASKED else 0
    for i in range(n_now):
        _add_row(total, array_at(follows + int(experts[i]) * row_bytes, width, np.int16))
    if LAG:
        for i in range(before[0]):
            _add_row(total, array_at(lagged + int(before[1 + i]) * row_bytes, width, np.int16))
    if PAIRS == 1:
        for i in range(n_now):
            for j in range(i):
                row = pair_row(int(experts[i]), int(experts[j]), n_rows)
                _add_row(total, array_at(pairs + row * row_bytes, width, np.int16))
    for x in range(width):
        error[x] = -min(max(int(total[x]), -_LIMIT), _LIMIT)
    of_turn[0] = n_now
    for i in range(n_now):
        of_turn[1 + i] = experts[i]
    if learns:
        for x in range(n_experts):
            snap[x] = min(int(recent[x]) >> 5, 32767)
            snap[width + x] = int(view.heat[x]) << 7

    if n_missing > 0:
        for slot in range(len(view.order)):
            if view.order[slot] >> SLOT_BITS > 0:
                o = int(view.owner[slot])
                view.order[slot] = (_rank(int(total[o]), int(last[o])) << SLOT_BITS) | slot


@compiled
def _rank(said: int, last: int) -> int:
    return 1 + (((min(max(said, -_LIMIT), _LIMIT) + _LIMIT) << _USE_BITS) | (last & _LAST_USE))


@compiled
def use(view: LayerView, expert: int, now: int) -> int:
    """Heat the expert."""
    view.heat[expert] = min(int(view.heat[expert]) + HEAT_PER_USE, HEAT_LIMIT)
    width = padded(len(view.heat))
    return _rank(int(view.notes[_HEAD + 2 * width + expert]), now)


def reheated(ranks: I64, heat: I64) -> I64:
    """Take the heat for what the model says."""
    said = heat * ONE // HEAT_LIMIT + _LIMIT
    return 1 + ((said << _USE_BITS) | ((ranks - 1) & _LAST_USE))


begin = begin_for(__name__)
