"""Recorded routing in memory: which experts each layer asked for, call by call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from expertier.errors import ConfigError

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]

MOST_EXPERTS = 1 << 20
"""An id that is not below this limit means a broken file, not a model."""


class Phase(IntEnum):
    """What a call was for."""

    PREFILL = 0
    DECODE = 1


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """The calls of a recording, in the order in which they were made.

    A call is one layer in one step: the distinct experts that the step's rows (tokens that ran together) asked for.
    C calls, N experts in all of them, L layers, S sequences; sequences follow one another and share nothing but the
    order.
    """

    layer: I32
    """[C] the call's layer, counted from 0."""
    step: I64
    """[C] the call's step; calls of one step need not follow one another, as a prompt may run layer by layer."""
    phase: U8
    """[C] a `Phase`."""
    rows: I32
    """[C] how many rows asked, 1 and more."""
    bounds: I64
    """[C + 1] call i asked for experts[bounds[i] : bounds[i + 1]]."""
    experts: I32
    """[N] as they were recorded: the heaviest of a row first where that is known."""
    sequences: I64
    """[S + 1] sequence i is the calls sequences[i] .. sequences[i + 1]."""
    n_experts: I32
    """[L] how many experts each layer has."""
    blocks: I32
    """[L] the layer's number in the model, which counts layers without experts too."""
    expert_bytes: I64 | None = None
    """[L] the bytes of one expert; None where the recording does not say."""
    resident: U8 | None = None
    """[N] 1 where the recording device had the expert already; None where that was not recorded."""

    @property
    def n_layers(self) -> int:
        """Return how many layers have experts."""
        return len(self.n_experts)

    @property
    def n_calls(self) -> int:
        """Return how many calls there are."""
        return len(self.layer)

    @property
    def n_sequences(self) -> int:
        """Return how many sequences there are."""
        return len(self.sequences) - 1

    @property
    def lengths(self) -> I64:
        """Return [C]: how many experts each call asked for."""
        lengths: I64 = np.diff(self.bounds)
        return lengths

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Yield the first call and the one after the last of each sequence that has calls."""
        for begin, end in zip(self.sequences[:-1].tolist(), self.sequences[1:].tolist(), strict=True):
            if begin < end:
                yield begin, end

    def ascending(self) -> I32:
        """Return [N]: each call's experts in ascending order, which is how the engine's plugin asks."""
        return _sorted_by_call(self.bounds, self.experts)[1]

    def with_bytes(self, expert_bytes: int) -> Trace:
        """Return the trace with experts of `expert_bytes` in every layer."""
        return replace(self, expert_bytes=np.full(self.n_layers, expert_bytes, np.int64))

    def with_experts(self, n_experts: int) -> Trace:
        """Return the trace with `n_experts` experts in every layer. Raises `ConfigError` where it names more."""
        most = int(self.experts.max(initial=-1)) + 1
        if not most <= n_experts <= MOST_EXPERTS:
            raise ConfigError(
                f"asked for layers of {n_experts} experts: this recording names expert {most - 1}, so give {most} to "
                f"{MOST_EXPERTS}"
            )
        return replace(self, n_experts=np.full(self.n_layers, n_experts, np.int32))

    def section(self, first: int, last: int) -> Trace:
        """Return the calls `first` .. `last` as one sequence."""
        low, high = int(self.bounds[first]), int(self.bounds[last])
        return replace(
            self,
            layer=self.layer[first:last],
            step=self.step[first:last],
            phase=self.phase[first:last],
            rows=self.rows[first:last],
            bounds=self.bounds[first : last + 1] - low,
            experts=self.experts[low:high],
            sequences=np.array([0, last - first], np.int64),
            resident=None if self.resident is None else self.resident[low:high],
        )

    def of_phase(self, phase: Phase) -> Trace:
        """Return the calls of one phase, in their order."""
        chosen = np.flatnonzero(self.phase == phase)
        which = np.repeat(self.phase == phase, self.lengths)
        return replace(
            self,
            layer=self.layer[chosen],
            step=self.step[chosen],
            phase=self.phase[chosen],
            rows=self.rows[chosen],
            bounds=np.concatenate(([0], np.cumsum(self.lengths[chosen]))).astype(np.int64),
            experts=self.experts[which],
            sequences=np.searchsorted(chosen, self.sequences).astype(np.int64),
            resident=None if self.resident is None else self.resident[which],
        )

    def check_valid(self) -> None:
        """Assert the shapes and ranges that the fields' descriptions promise."""
        n = self.n_calls
        assert len(self.step) == len(self.phase) == len(self.rows) == n == len(self.bounds) - 1
        for bounds, end in ((self.bounds, len(self.experts)), (self.sequences, n)):
            assert bounds[0] == 0, bounds
            assert bounds[-1] == end, bounds
            assert (np.diff(bounds) >= 0).all(), bounds
        assert len(self.blocks) == self.n_layers > 0
        assert (np.diff(self.blocks) > 0).all(), "blocks rise"
        assert self.expert_bytes is None or (len(self.expert_bytes) == self.n_layers)
        assert self.resident is None or len(self.resident) == len(self.experts)
        if n:
            assert (self.lengths > 0).all(), "a call asks for something"
            assert (self.rows > 0).all()
            assert ((self.layer >= 0) & (self.layer < self.n_layers)).all()
            layer = np.repeat(self.layer, self.lengths)
            assert ((self.experts >= 0) & (self.experts < self.n_experts[layer])).all()
            assert first_repeated(self.bounds, self.experts) is None, "a call names an expert once"


def first_repeated(bounds: I64, experts: I32) -> int | None:
    """Return the first call that names an expert twice, or None."""
    call, named = _sorted_by_call(bounds, experts)
    twice = np.flatnonzero((call[1:] == call[:-1]) & (named[1:] == named[:-1]))
    return int(call[twice[0]]) if len(twice) else None


def _sorted_by_call(bounds: I64, experts: I32) -> tuple[I64, I32]:
    """Return [N] the call and [N] the expert, in ascending order of both."""
    lengths = np.diff(bounds)
    call = np.repeat(np.arange(len(lengths)), lengths)
    if len(lengths) and (lengths == lengths[0]).all():  # as in decode; about ten times as fast
        return call, np.sort(experts.reshape(len(lengths), -1), axis=1).ravel()
    return call, experts[np.lexsort((experts, call))]


def trace_from_ids(
    ids: npt.NDArray[np.integer], offsets: npt.NDArray[np.integer] | None = None, n_experts: int | None = None
) -> Trace:
    """Return the trace of single-row decode steps: `ids` [steps, layers, top-k], `offsets` [sequences + 1] in steps.

    The experts of a step differ, and are below `n_experts`, which is by default the largest id plus 1.
    """
    steps, layers, top_k = ids.shape
    bounds = np.array([0, steps]) if offsets is None else offsets
    n = n_experts if n_experts is not None else int(ids.max()) + 1
    return Trace(
        layer=np.tile(np.arange(layers, dtype=np.int32), steps),
        step=np.repeat(np.arange(steps, dtype=np.int64), layers),
        phase=np.full(steps * layers, Phase.DECODE, np.uint8),
        rows=np.ones(steps * layers, np.int32),
        bounds=np.arange(steps * layers + 1, dtype=np.int64) * top_k,
        experts=np.ascontiguousarray(ids.reshape(-1), np.int32),
        sequences=bounds.astype(np.int64) * layers,
        n_experts=np.full(layers, n, np.int32),
        blocks=np.arange(layers, dtype=np.int32),
    )
