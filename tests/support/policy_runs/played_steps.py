"""Steps of decode played through a residency, by the replay's own loop."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from expertier.planner.policy.residency import Residency
from expertier.planner.replay.calls import make_calls, make_counts, make_pool
from expertier.planner.replay.policy import play_calls
from expertier.planner.traces.trace import trace_from_ids


def play(residency: Residency, steps: npt.NDArray[np.int32]) -> None:
    """Take and release the experts of `steps` ([steps, layers, experts a call]) in order.

    Every miss is filled at once. The counters of `residency` say what came of it.
    """
    trace = trace_from_ids(steps, n_experts=int(residency.n_experts.max()))
    calls = make_calls(trace, trace.experts, residency.n_slots.tolist())
    play_calls(residency, calls, make_pool(trace, 0), make_counts(trace.n_layers), 0, trace.n_calls)
