"""Records the routing of a live run: what `--record-routing` writes."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import numpy as np

from expertier.planner.traces.trace import Phase, Trace


class RoutingRecorder:
    """The look-ups of an engine as a trace, gathered between its batches.

    Not thread-safe. Takes 4 bytes an expert and 25 a layer call until `trace`.
    """

    def __init__(
        self,
        n_experts: Sequence[int],
        blocks: Sequence[int],
        expert_bytes: Sequence[int],
        *,
        rows_at_once: int,
    ) -> None:
        """Start an empty recording; each of the sequences has one number for each layer.

        `rows_at_once` is the most rows that the engine runs together; a longer batch is several steps.
        """
        assert len(n_experts) == len(blocks) == len(expert_bytes), "one number a layer of each"
        assert rows_at_once >= 1, rows_at_once
        self._n_experts, self._blocks, self._expert_bytes = n_experts, blocks, expert_bytes
        self._rows_at_once = rows_at_once
        self._layer, self._step, self._rows = array("i"), array("q"), array("i")
        self._phase = array("B")
        self._bounds, self._experts = array("q", [0]), array("i")
        self._steps = 0

    def add(self, lookups: Iterable[tuple[int, Sequence[int]]], phase: Phase, rows: int) -> None:
        """Record a batch of `rows` rows: its look-ups (layer, distinct experts) in the order in which they were made.

        Look-ups of one layer that follow one another and share no expert are the groups of one call. Where the layers
        start anew, or experts repeat, the next step of the batch begins.
        """
        left = rows
        last_layer, named = -1, set[int]()
        for layer, experts in lookups:
            if not experts:
                continue
            if layer == last_layer and named.isdisjoint(experts):
                self._bounds.pop()
            else:
                if last_layer >= 0 and layer <= last_layer:
                    left = max(left - self._rows_at_once, 1)
                    self._steps += 1
                named = set()
                self._layer.append(layer)
                self._step.append(self._steps)
                self._phase.append(phase)
                self._rows.append(min(left, self._rows_at_once))
            last_layer = layer
            named.update(experts)
            self._experts.extend(experts)
            self._bounds.append(len(self._experts))
        if last_layer >= 0:
            self._steps += 1

    def trace(self) -> Trace:
        """Return the recording so far as one sequence, in new arrays."""
        return Trace(
            layer=np.array(self._layer, np.int32),
            step=np.array(self._step, np.int64),
            phase=np.array(self._phase, np.uint8),
            rows=np.array(self._rows, np.int32),
            bounds=np.array(self._bounds, np.int64),
            experts=np.array(self._experts, np.int32),
            sequences=np.array([0, len(self._layer)], np.int64),
            n_experts=np.array(self._n_experts, np.int32),
            blocks=np.array(self._blocks, np.int32),
            expert_bytes=np.array(self._expert_bytes, np.int64),
        )
