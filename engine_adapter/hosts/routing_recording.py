"""Records the routing of a live run in a file: `expertier run --record-routing FILE`."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

from expertier.atomic_file import check_output
from expertier.engine_adapter.binding.lookup_log import LookupLog
from expertier.interrupts import interrupts_deferred
from expertier.planner.traces.archive import write_trace
from expertier.planner.traces.recorder import RoutingRecorder
from expertier.planner.traces.trace import Phase
from expertier.tiers.model.table import ExpertTable


class RoutingRecording:
    """Records what a model's engine looks up, and writes it at the end of the `with` block, even if that raises."""

    def __init__(self, path: Path, table: ExpertTable, *, n_ubatch: int) -> None:
        """Start empty; `n_ubatch` is the most rows that the engine runs at once.

        Raises ConfigError where `path` cannot be written, so that a long run does not fail only at its end.
        """
        check_output(path, "recorded routing")
        self._path = path
        self.log = LookupLog()
        """The log of look-ups, for `TieredModel.open`."""
        self._recorder = RoutingRecorder(
            [layer.n_experts for layer in table.layers],
            [layer.block for layer in table.layers],
            [layer.expert_bytes for layer in table.layers],
            rows_at_once=n_ubatch,
        )

    def after_batch(self, phase: Phase, rows: int) -> None:
        """Record the experts that a batch of `rows` rows looked up; for `generate`."""
        with interrupts_deferred():
            self._recorder.add(self.log.take(), phase, rows)

    def __enter__(self) -> RoutingRecording:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with interrupts_deferred():
            recorded = self._recorder.trace()
            if recorded.n_calls:
                write_trace(self._path, recorded)
