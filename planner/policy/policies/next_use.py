"""Next use: a linear model, which learns while the layer runs, predicts each expert's next use; the last leaves first.

The model says how near the next use of each expert of the layer is: 1 for the very next call, and a smaller share for
each later call. Its prediction is the sum of

    how much the expert was used of late     heat (+16 a use, halved every 20 calls) and a shorter average, weighted
    the experts of this call and the last    tables [experts, experts]: which expert follows which
    every two experts of this call           a table [rows, experts], in which pairs share rows by a hash

The model learns from its prediction of LOOK_AHEAD calls ago: each number in that sum moves a little against the error
(least mean squares). It sees only the layer's own calls and needs neither training nor logits. How far it looks ahead
depends on the slots: with few slots only the next calls matter. The larger a call, the less its experts say: the model
looks at no pairs in a call of more than PAIRS_UP_TO experts, and counts a call of more than MOST_ASKED experts (a
prompt) only as heat.

All numbers are integers, and shares are 16384ths, so that compiled code and the interpreter agree. docs/measurements.md
says what the policy gains and costs, docs/measurements/next-use.md what else was tried.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from expertier.planner.policy.policy import begin_for
from expertier.planner.policy.tables import I32, I64, SLOT_BITS, LayerView, array_at, compiled

I16 = npt.NDArray[np.int16]

HEAT_PER_USE = 16
HEAT_LIMIT = 255
CALLS_PER_HALVING = 20

LOOK_AHEAD = 8
MOST_ASKED = 64
PAIRS_UP_TO = 16
MOST_PAIR_ROWS = 1024

_ONE_BITS = 14
_ONE = 1 << _ONE_BITS
_LIMIT = 2 * _ONE - 1  # of a prediction; twice that still fits 16 bits without the sign

# A step of learning is the 2^-n-th part of an error: n for single experts and n for pairs; 1 more where slots are many.
_STEP_BITS, _PAIR_STEP_BITS = 9, 8
_MANY_SLOTS = 4  # for each expert of a call

_FADE_BITS = 3  # the shorter average loses an eighth a call
_RECENT_BITS = 20
_WEIGHT_BITS = 12
_WEIGHT_LIMIT = 1 << 16
_FIRST_WEIGHT = 1 << (_WEIGHT_BITS - 1)
_LEARN_WEIGHTS_EVERY = 4
_WEIGHT_STEP_BITS = _ONE_BITS + 15 - _WEIGHT_BITS + 7

# The first notes of a layer.
_SINCE, _HEAT_WEIGHT, _RECENT_WEIGHT = range(3)
_HEAD = 4

# A rank is 1 + the prediction * 2^28 + the call of the last use.
_USE_BITS = 28
_LAST_USE = (1 << _USE_BITS) - 1
_CALL = (1 << 31) - 1  # calls as int32


class Model(NamedTuple):
    """A layer's notes: arrays, and addresses of rows of `width` int16 numbers."""

    width: int
    """The number of experts, rounded up to whole vectors."""
    pair_rows: int
    recent: I32
    """[width] an average of the uses, in 2^-20ths."""
    last: I32
    """[width] the call of the last use."""
    said: I32
    """[width] the predictions of the last call."""
    change: I16
    """[width] scratch."""
    asked: int
    """For each of the last LOOK_AHEAD calls: the number of its experts, and the experts; int32[1 + MOST_ASKED]."""
    errors: int
    """For each of the same calls: what came minus what was predicted."""
    seen: int
    """For every fourth of these calls: two rows, `recent` and heat as they were."""
    follows: int
    """Row e: what it says of each expert that e is in this call."""
    lags: int
    """Row e: what it says of each expert that e was in the call before."""
    pairs: int


@compiled
def _padded(n_experts: int) -> int:
    return (n_experts + 15) // 16 * 16


@compiled
def _pair_rows(width: int) -> int:
    """Return a power of two: rows for all pairs of 45 experts, with at most MOST_PAIR_ROWS * 256 numbers in all."""
    return MOST_PAIR_ROWS if width <= 256 else MOST_PAIR_ROWS >> 1


def n_notes(n_experts: int) -> int:
    """Return how many notes there are: 83,660 for 128 experts, 398,604 (1.5 MiB) for 512."""
    width = _padded(n_experts)
    rows = 1 + LOOK_AHEAD + 2 * (LOOK_AHEAD // _LEARN_WEIGHTS_EVERY) + 2 * width + _pair_rows(width)
    return _HEAD + 3 * width + LOOK_AHEAD * (1 + MOST_ASKED) + rows * width // 2


@compiled
def _model(view: LayerView) -> Model:
    width = _padded(len(view.heat))
    row = width * 2
    first = view.notes.ctypes.data + _HEAD * 4
    change = first + 3 * width * 4
    asked = change + row
    errors = asked + LOOK_AHEAD * (1 + MOST_ASKED) * 4
    seen = errors + LOOK_AHEAD * row
    follows = seen + 2 * (LOOK_AHEAD // _LEARN_WEIGHTS_EVERY) * row
    lags = follows + width * row
    return Model(
        width,
        _pair_rows(width),
        array_at(first, width, np.int32),
        array_at(first + width * 4, width, np.int32),
        array_at(first + 2 * width * 4, width, np.int32),
        array_at(change, width, np.int16),
        asked,
        errors,
        seen,
        follows,
        lags,
        lags + width * row,
    )


@compiled
def _row(model: Model, table: int, number: int) -> Any:
    """Return a row of the table at an address: int16[width]."""
    return array_at(table + number * model.width * 2, model.width, np.int16)


@compiled
def _asked(model: Model, turn: int) -> Any:
    return array_at(model.asked + turn * (1 + MOST_ASKED) * 4, 1 + MOST_ASKED, np.int32)


@compiled
def _pair(model: Model, one: int, other: int) -> int:
    """Return the row of two experts."""
    both = (min(one, other) << 10) | max(one, other)
    return ((both * 2654435761 & 0xFFFFFFFF) >> 7) & (model.pair_rows - 1)


@compiled
def _fade(view: LayerView, model: Model) -> None:
    """Let heat and the shorter average fade by one call."""
    since = int(view.notes[_SINCE]) + 1
    if since >= CALLS_PER_HALVING:
        for expert in range(len(view.heat)):
            view.heat[expert] >>= 1
        since = 0
    view.notes[_SINCE] = since
    for expert in range(model.width):
        model.recent[expert] -= model.recent[expert] >> _FADE_BITS


@compiled
def _note_uses(view: LayerView, model: Model, experts: I32, n: int, now: int) -> None:
    """Write into the errors of earlier calls how near this call's uses were, where they are the first uses since."""
    fading = max(_ONE - _ONE * n // (2 * len(view.owner)), _ONE >> 1)
    for i in range(n):
        expert = int(experts[i])
        age = ((now & _CALL) - int(model.last[expert])) & _CALL
        near = _ONE
        for back in range(1, min(age, LOOK_AHEAD, now - 1) + 1):
            error = _row(model, model.errors, (now - back) % LOOK_AHEAD)
            error[expert] = min(int(error[expert]) + near, 32767)
            near = near * fading >> _ONE_BITS
        model.last[expert] = now & _CALL
        if age > 0:
            model.recent[expert] += 1 << (_RECENT_BITS - _FADE_BITS)


@compiled
def _scale(model: Model, error: I16, bits: int) -> None:
    """Make `change` the 2^-bits-th part of an error, rounded."""
    half = 1 << (bits - 1)
    for expert in range(model.width):
        model.change[expert] = (int(error[expert]) + half) >> bits


@compiled
def _move(row: I16, change: I16) -> None:
    """Add `change`. Sums wrap around at 16 bits; bounded errors never get that far."""
    for expert in range(len(change)):
        row[expert] = ((int(row[expert]) + int(change[expert]) + 32768) & 65535) - 32768


@compiled
def _learn(view: LayerView, model: Model, turn: int, finer: int) -> None:
    """Learn from the call of LOOK_AHEAD calls ago, whose turn it is again."""
    then = _asked(model, turn)
    n_then = int(then[0])
    if n_then == 0:
        return
    error = _row(model, model.errors, turn)
    _scale(model, error, _STEP_BITS + finer)
    for i in range(n_then):
        _move(_row(model, model.follows, int(then[1 + i])), model.change)
    if n_then <= PAIRS_UP_TO:
        _scale(model, error, _PAIR_STEP_BITS + finer)
        for i in range(n_then):
            for j in range(i):
                number = _pair(model, int(then[1 + i]), int(then[1 + j]))
                _move(_row(model, model.pairs, number), model.change)
    # It was the last call before the next turn's, whose error is known except for the farthest use.
    _scale(model, _row(model, model.errors, (turn + 1) % LOOK_AHEAD), _STEP_BITS + finer)
    for i in range(n_then):
        _move(_row(model, model.lags, int(then[1 + i])), model.change)
    if turn % _LEARN_WEIGHTS_EVERY == 0:
        _learn_weight(view, model, error, turn, _RECENT_WEIGHT, n_then)
        _learn_weight(view, model, error, turn, _HEAT_WEIGHT, n_then)


@compiled
def _learn_weight(view: LayerView, model: Model, error: I16, turn: int, weight: int, n_then: int) -> None:
    """Move the weight of heat or of the shorter average."""
    seen = _row(model, model.seen, turn // _LEARN_WEIGHTS_EVERY * 2 + weight - _HEAT_WEIGHT)
    slope = 0
    for expert in range(model.width):
        slope += int(error[expert]) * int(seen[expert])
    moved = int(view.notes[weight]) + (slope // n_then >> _WEIGHT_STEP_BITS)
    view.notes[weight] = min(max(moved, -_WEIGHT_LIMIT), _WEIGHT_LIMIT)


@compiled
def _say(view: LayerView, model: Model, experts: I32, n: int, turn: int) -> None:
    """Predict how near each expert's next use is."""
    said = model.said
    recent_weight, heat_weight = int(view.notes[_RECENT_WEIGHT]), int(view.notes[_HEAT_WEIGHT])
    for expert in range(len(view.heat)):
        from_recent = (
            recent_weight * (int(model.recent[expert]) >> (_RECENT_BITS - _ONE_BITS)) >> _WEIGHT_BITS
        )
        from_heat = heat_weight * (int(view.heat[expert]) << (_ONE_BITS - 8)) >> _WEIGHT_BITS
        said[expert] = from_recent + from_heat
    before = _asked(model, (turn + LOOK_AHEAD - 1) % LOOK_AHEAD)
    for i in range(int(before[0])):
        _add(said, _row(model, model.lags, int(before[1 + i])))
    if n <= MOST_ASKED:
        for i in range(n):
            _add(said, _row(model, model.follows, int(experts[i])))
    if n <= PAIRS_UP_TO:
        for i in range(n):
            for j in range(i):
                _add(said, _row(model, model.pairs, _pair(model, int(experts[i]), int(experts[j]))))


@compiled
def _add(said: I32, row: I16) -> None:
    for expert in range(len(said)):
        said[expert] += row[expert]


@compiled
def _remember(view: LayerView, model: Model, experts: I32, n: int, turn: int) -> None:
    """Save what learning from this call needs."""
    error = _row(model, model.errors, turn)
    for expert in range(model.width):
        error[expert] = -min(max(int(model.said[expert]), -_LIMIT), _LIMIT)
    asked = _asked(model, turn)
    n_kept = n if n <= MOST_ASKED else 0
    asked[0] = n_kept
    for i in range(n_kept):
        asked[1 + i] = experts[i]
    if turn % _LEARN_WEIGHTS_EVERY == 0:
        heat = _row(model, model.seen, turn // _LEARN_WEIGHTS_EVERY * 2)
        recent = _row(model, model.seen, turn // _LEARN_WEIGHTS_EVERY * 2 + 1)
        for expert in range(len(view.heat)):
            heat[expert] = int(view.heat[expert]) << 7
            recent[expert] = min(int(model.recent[expert]) >> (_RECENT_BITS - 15), 32767)


@compiled
def _rank(said: int, call: int) -> int:
    return 1 + (((min(max(said, -_LIMIT), _LIMIT) + _LIMIT) << _USE_BITS) | (call & _LAST_USE))


@compiled
def step(view: LayerView, experts: I32, n: int, n_missing: int, now: int) -> None:
    """Learn from the call, and predict anew how near each expert's next use is."""
    model = _model(view)
    if now == 1:
        view.notes[_HEAT_WEIGHT] = _FIRST_WEIGHT
        view.notes[_RECENT_WEIGHT] = _FIRST_WEIGHT
    turn = now % LOOK_AHEAD
    _fade(view, model)
    _note_uses(view, model, experts, n, now)
    _learn(view, model, turn, 1 if len(view.owner) > _MANY_SLOTS * n else 0)
    _say(view, model, experts, n, turn)
    _remember(view, model, experts, n, turn)
    if n_missing > 0:
        for slot in range(len(view.order)):
            if view.order[slot] >> SLOT_BITS > 0:  # neither FREE nor speculative
                expert = view.owner[slot]
                rank = _rank(int(model.said[expert]), int(model.last[expert]))
                view.order[slot] = (rank << SLOT_BITS) | slot


@compiled
def use(view: LayerView, expert: int, now: int) -> int:
    """Heat the expert."""
    view.heat[expert] = min(int(view.heat[expert]) + HEAT_PER_USE, HEAT_LIMIT)
    return _rank(int(_model(view).said[expert]), now)


def reheated(ranks: I64, heat: I64) -> I64:
    """Take the heat for the prediction, as there is none yet of residents that no call has used."""
    return 1 + (((heat * _ONE // HEAT_LIMIT + _LIMIT) << _USE_BITS) | ((ranks - 1) & _LAST_USE))


begin = begin_for(__name__)
