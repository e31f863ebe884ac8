"""Recorded routing played through the policy, by the functions that production runs."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from expertier.compiled_functions import cached_njit
from expertier.planner.policy.residency import Residency
from expertier.planner.policy.tables import COMPILED, COMPLETE, I32, RELEASE, source_stamp

if COMPILED:
    from expertier.planner.policy.calls import c_calls as how
else:
    from expertier.planner.policy.calls import interpreted as how  # type: ignore[no-redef]


def play(residency: Residency, steps: I32) -> None:
    """Take and release the experts of `steps` ([steps, layers, experts a call], contiguous int32) in order.

    Every miss is filled at once. The counters of `residency` say what came of it. Raises `ValueError` for
    steps that the tables refuse: other layers or experts, more experts than a layer has slots, or slots that
    someone holds.
    """
    if steps.ndim != 3 or steps.shape[1] != len(residency.n_slots):
        raise ValueError(
            f"asked to play steps of {steps.shape}: give [steps, {len(residency.n_slots)} layers, experts a call]"
        )
    status = _loop(source_stamp())(residency.directory_address, np.ascontiguousarray(steps, np.int32))
    if status < 0:
        raise ValueError(
            f"the tables refused a step (outcome {status}): its experts must fit the layers' {residency.n_slots} "
            "slots, be below their numbers of experts, and find their slots unpinned"
        )


@cache
def _loop(stamp: int) -> Any:
    """Compile the loop. `stamp` is a cell of it, and so part of its key in Numba's cache."""

    @cached_njit()
    def loop(directory: int, steps: I32) -> int:
        if stamp == 0:
            return 0
        slots = np.empty(steps.shape[2], np.int32)
        miss_index = np.empty(steps.shape[2], np.int32)
        for step in range(steps.shape[0]):
            for layer in range(steps.shape[1]):
                misses = how.begin(directory, layer, steps[step, layer], slots, miss_index)
                if misses < 0:
                    return misses
                if misses > 0:
                    how.on_slots(directory, COMPLETE, layer, slots)
                how.on_slots(directory, RELEASE, layer, slots)
        return 0

    return loop
