"""Reads the CSV of BigMoeOnEdge's route trace: comment lines on the model, then a line for each routed expert.

    # model=... n_layer=30 n_expert=128 ...
    # layer=0 expert_bytes=4336640 ...
    turn,phase,step,layer,slot,expert,weight,residency,expert_bytes
    0,0,0,0,0,79,0.425021,0,4336640

`phase` is 0 for prefill and 1 for decode, `slot` the expert's place among the experts of its row, and `residency` says
whether the device had the expert. A file needs the columns phase, step, layer and expert; it may have them in any
order, and more columns.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from expertier.errors import ConfigError
from expertier.planner.traces.trace import MOST_EXPERTS, Trace

_NEEDED = ("phase", "step", "layer", "expert")
_PAIR = re.compile(r"(\w+)=(\S+)")


class _Row(NamedTuple):
    turn: int
    phase: int
    step: int
    layer: int
    expert: int
    slot: int | None
    residency: int | None


class _Header:
    """What the comment lines say."""

    def __init__(self) -> None:
        self.n_layers: int | None = None
        self.n_experts: int | None = None
        self.expert_bytes: dict[int, int] = {}

    def read(self, where: str, line: str) -> None:
        """Read a comment line, and ignore the keys that are not known."""
        pairs = dict(_PAIR.findall(line))
        if "n_layer" in pairs:
            self.n_layers = _number(where, "n_layer", pairs["n_layer"])
        if "n_expert" in pairs:
            self.n_experts = _number(where, "n_expert", pairs["n_expert"])
        if "layer" in pairs and "expert_bytes" in pairs:
            layer = _number(where, "layer", pairs["layer"])
            if layer in self.expert_bytes:
                raise ConfigError(f"{where}: layer {layer} is described a second time; one line a layer")
            self.expert_bytes[layer] = _number(where, "expert_bytes", pairs["expert_bytes"])


def parse_csv(name: str, lines: Iterable[str]) -> Trace:
    """Return the trace of a CSV's `lines`; all turns are one sequence, and each row is a step of its own.

    Calls stand in the order of the lines. Raises ConfigError, which begins with `name` and the number of the line.
    """
    header, columns, calls, experts, resident = _Header(), None, [], [], []
    lengths: list[int] = []
    steps: dict[tuple[int, int, int], int] = {}
    last: tuple[int, int, int, int] | None = None
    named: set[int] = set()
    for number, line in enumerate(lines, 1):
        where = f"{name}, line {number}"
        text = line.strip()
        if not text:
            continue
        if text.startswith("#"):
            header.read(where, text)
            continue
        fields = text.split(",")
        if columns is None:
            columns = _columns(where, fields)
            continue
        row = _row(where, columns, fields, header)
        key = row[:4]
        if key != last:
            last = key
            named.clear()
            calls.append((row.layer, steps.setdefault(key[:3], len(steps)), row.phase))
            lengths.append(0)
        if row.slot is not None and row.slot != lengths[-1]:
            raise ConfigError(
                f"{where}: slot {row.slot} follows {lengths[-1]} experts of its row; slots count from 0, so a "
                "line is missing or stands twice"
            )
        if row.expert in named:
            raise ConfigError(
                f"{where}: expert {row.expert} of layer {row.layer} stands a second time in step {row.step}; "
                "the experts of a row are different ones"
            )
        named.add(row.expert)
        lengths[-1] += 1
        experts.append(row.expert)
        resident.append(row.residency)
    if not calls:
        raise ConfigError(f"{name}: no line with a routed expert; the recording is empty")
    return _assemble(name, header, calls, lengths, experts, resident)


def _columns(where: str, fields: list[str]) -> dict[str, int]:
    columns = {field.strip(): place for place, field in enumerate(fields)}
    missing = [needed for needed in _NEEDED if needed not in columns]
    if missing:
        raise ConfigError(
            f"{where}: columns {', '.join(columns)}; {', '.join(missing)} missing. The first line that is no "
            f"comment names the columns, {', '.join(_NEEDED)} at least"
        )
    if len(columns) != len(fields):
        raise ConfigError(f"{where}: a column is named twice in {', '.join(fields)}")
    return columns


def _row(where: str, columns: Mapping[str, int], fields: list[str], header: _Header) -> _Row:
    if len(fields) != len(columns):
        raise ConfigError(f"{where}: {len(fields)} fields for {len(columns)} columns: {','.join(fields)!r}")

    def integer(name: str, default: int | None) -> int | None:
        place = columns.get(name)
        return default if place is None else _number(where, name, fields[place])

    turn, phase, step = integer("turn", 0), integer("phase", None), integer("step", None)
    layer, expert = integer("layer", None), integer("expert", None)
    residency = integer("residency", None)
    assert turn is not None
    assert phase is not None
    assert step is not None
    assert layer is not None
    assert expert is not None
    for name, value in (("phase", phase), ("residency", residency)):
        if value not in (0, 1, None):
            raise ConfigError(f"{where}: {name} is {value}; it is 0 or 1")
    if header.n_layers is not None and layer >= header.n_layers:
        raise ConfigError(f"{where}: layer {layer} of a model with n_layer={header.n_layers}")
    limit = header.n_experts if header.n_experts is not None else MOST_EXPERTS
    if expert >= limit:
        raise ConfigError(f"{where}: expert {expert}; they count from 0 and stay below {limit}")
    if "weight" in columns:
        _check_weight(where, fields[columns["weight"]])
    return _Row(turn, phase, step, layer, expert, integer("slot", None), residency)


def _check_weight(where: str, text: str) -> None:
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not math.isfinite(weight):
        raise ConfigError(f"{where}: weight is {text!r}; it is a finite number")


def _number(where: str, name: str, text: str) -> int:
    digits = text.strip()
    if not (digits.isascii() and digits.isdigit()) or len(digits) > 18:
        raise ConfigError(f"{where}: {name} is {text!r}; it is a whole number of 0 or more")
    return int(digits)


def _assemble(
    name: str,
    header: _Header,
    calls: list[tuple[int, int, int]],
    lengths: list[int],
    experts: list[int],
    resident: list[int | None],
) -> Trace:
    """Number the layers that have experts and make the arrays."""
    table = np.array(calls, np.int64)
    used = set(table[:, 0].tolist())
    blocks = np.array(sorted(used | {layer for layer, n in header.expert_bytes.items() if n > 0}), np.int32)
    sizes = None
    if header.expert_bytes:
        unknown = [block for block in blocks.tolist() if not header.expert_bytes.get(block)]
        if unknown:
            raise ConfigError(
                f"{name}: layers {unknown} are used, but no comment line gives their expert_bytes, as those of "
                "other layers do; add `# layer=... expert_bytes=...` or remove all such lines"
            )
        sizes = np.array([header.expert_bytes[block] for block in blocks.tolist()], np.int64)
    n_experts = header.n_experts if header.n_experts is not None else max(experts) + 1
    return Trace(
        layer=np.searchsorted(blocks, table[:, 0]).astype(np.int32),
        step=np.ascontiguousarray(table[:, 1]),
        phase=table[:, 2].astype(np.uint8),
        rows=np.ones(len(calls), np.int32),
        bounds=np.concatenate(([0], np.cumsum(lengths))).astype(np.int64),
        experts=np.array(experts, np.int32),
        sequences=np.array([0, len(calls)], np.int64),
        n_experts=np.full(len(blocks), n_experts, np.int32),
        blocks=blocks,
        expert_bytes=sizes,
        resident=None if resident[0] is None else np.array(resident, np.uint8),
    )
