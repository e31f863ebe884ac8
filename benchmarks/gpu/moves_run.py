"""Measures what moves of the boundary cost; run by `child` with `MovesOptions` as JSON.

A prefill of one micro-batch and then single tokens, in turn, in one context; the tokens replay the model's routing.
Three ways: compute buffers in the slab with the boundary moving each time that it can; in the slab with a boundary that
stays; and outside of the slab, as stock allocates them. All ways have as many slots while a prefill computes.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from expertier.engine_adapter.binding import slab_compute
from expertier.engine_adapter.llama_cpp import LlamaModel, LoadedEngine
from expertier.engine_adapter.open import open_engine
from expertier.errors import DeviceError
from expertier.hip.device import Device
from expertier.planner.budget.context_memory import ContextShape
from expertier.tiers.tier_set import TierSet
from expertier.units import MIB
from gpu.child import answer, tell
from gpu.opening import Placement, opened
from gpu.row_run import compute_counts, decode, prefill

ALWAYS, NEVER = -(1 << 60), 1 << 60  # missed bytes that make a move down pay
WAYS = {"in the slab, moving": ("1", ALWAYS), "in the slab, staying": ("1", NEVER), "apart": ("0", NEVER)}
_SIZES = (
    "boundary_bytes",
    "needed_bytes",
    "buffers",
    "buffer_bytes",
)  # of what is counted, those that shrink too
_N_TOKENS = 32  # after each prefill
_COPY_BYTES = 256 * MIB


@dataclass(frozen=True)
class MovesOptions:
    """What to measure: `rounds` prefills of `n_prefill` tokens, each with single tokens after it.

    One more such round runs before, and is not measured.
    """

    path: str
    placement: Placement
    tokens: list[int]
    rounds: int
    n_prefill: int
    n_ctx: int
    n_threads: int
    flash_attention: str
    llama_cpp: str | None


def copy_seconds(device: Device, n_bytes: int) -> float:
    """Return how long one copy of so many bytes within the device takes: of a part of them, where it has no room."""
    piece = min(n_bytes, _COPY_BYTES)
    memory = device.alloc(2 * piece)
    try:
        row = np.array([[memory + piece, memory, piece]], np.int64)
        device.copy_within(row)
        rows = np.repeat(row, max(n_bytes // piece, 1), axis=0)
        seconds = []
        for _ in range(5):
            start = time.perf_counter()
            device.copy_within(rows)
            seconds.append(time.perf_counter() - start)
    finally:
        device.free(memory)
    return statistics.median(seconds) * n_bytes / (len(rows) * piece)


def measure(engine: LoadedEngine, options: MovesOptions) -> dict[str, Any]:
    """Measure one way."""
    shape = ContextShape(n_ctx=options.n_ctx, n_ubatch=options.n_prefill, full_windows=True)
    prefills, steps, before = [], [], {}
    with opened(engine, options.path, options.placement, shape) as (model, tiers):
        assert tiers is not None
        with model.context(
            n_ctx=options.n_ctx,
            n_batch=options.n_prefill,
            n_ubatch=options.n_prefill,
            n_threads=options.n_threads,
            flash_attention=options.flash_attention,
        ) as context:
            prefill(
                context, options.tokens, len(options.tokens), all_logits=True
            )  # every expert is read once
            for i in range(options.rounds + 1):
                if i == 1:  # positions of the boundary that are new have cost more
                    before = _counts(model, tiers)
                prefills.append(prefill(context, options.tokens, options.n_prefill))
                context.forget()
                steps.append(decode(context, options.tokens[:_N_TOKENS]))
            found = _found(prefills[1:], steps[1:])
            counts = {
                name: n - before.get(name, 0) * (name not in _SIZES)
                for name, n in _counts(model, tiers).items()
            }
            found["slots_bytes"] = tiers.stats().l1.used_bytes
        found["moved_bytes"] = counts.pop("moved_bytes")
        found["compute"] = counts or None
        found["moves_ms"] = counts.get("move_ns", 0) / 1e6
        if found["moved_bytes"]:
            try:
                found["copy_ms"] = 1e3 * copy_seconds(tiers.managers[0].device, found["moved_bytes"])
            except DeviceError:  # no room for it
                found["copy_ms"] = None
        tiers.check_valid()
    return found


def _counts(model: LlamaModel, tiers: TierSet) -> dict[str, int]:
    """What of moves is counted, and how many bytes they moved."""
    return {**(compute_counts(model) or {}), "moved_bytes": tiers.stats().moves.moved_bytes}


def _found(prefills: list[float], steps: list[list[float]]) -> dict[str, Any]:
    return {
        "prefill_ms": statistics.median(prefills) * 1e3,
        "first_ms": statistics.median(seconds[0] for seconds in steps) * 1e3,
        "second_ms": statistics.median(seconds[1] for seconds in steps) * 1e3,
        "later_ms": statistics.median(s for seconds in steps for s in seconds[-_N_TOKENS // 2 :]) * 1e3,
    }


def main(given: dict[str, Any]) -> None:
    """Measure what was asked for, and tell after each way."""
    options = MovesOptions(**{**given, "placement": Placement(**given["placement"])})
    ways: dict[str, Any] = {}
    engine = open_engine(options.llama_cpp)
    for way, (wanted, cost) in WAYS.items():
        os.environ["MOE_SLAB_COMPUTE"] = wanted
        slab_compute.MOVE_COST_BYTES = cost
        ways[way] = measure(engine, options)
        tell({"ways": ways})


if __name__ == "__main__":
    sys.exit(answer(main))
