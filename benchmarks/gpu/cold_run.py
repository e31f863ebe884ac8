"""Measures how fast a fresh process decodes; run by `child` with `ColdOptions` as JSON.

The model is opened and the tokens are decoded at once, twice: the second pass is the same work on warm tiers.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disk_speed import drop_from_cache

from expertier.engine_adapter.open import open_engine
from expertier.planner.budget.context_memory import ContextShape
from gpu.child import answer, tell
from gpu.opening import Placement, opened
from gpu.row_run import Counts, decode, prefill


@dataclass(frozen=True)
class ColdOptions:
    """What to measure: `tokens`, after which `follows` is the likeliest, behind a prompt where that has some."""

    path: str
    placement: Placement
    prompt: list[int]
    tokens: list[int]
    follows: int
    profile: str | None
    waits: bool
    """Whether the first token waits until all experts that the profile asks for are loaded."""
    fill: str
    """MOE_FILL_L2."""
    is_cached: bool
    """Whether the page cache may hold the model's file."""
    n_ubatch: int
    n_threads: int
    flash_attention: str
    llama_cpp: str | None


def read_whole(path: str) -> None:
    """Have the page cache hold the file."""
    with Path(path).open("rb", buffering=0) as file:
        while file.read(1 << 24):
            pass


def disk_bytes() -> int:
    """Return what this process has had read from disks so far."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"])


def measure(options: ColdOptions) -> None:
    """Measure, and tell after each pass."""
    if options.profile is not None:
        os.environ["MOE_PROFILE"] = options.profile
    os.environ["MOE_FILL_L2"] = options.fill
    engine = open_engine(options.llama_cpp)
    (read_whole if options.is_cached else drop_from_cache)(options.path)
    n_prompt = len(options.prompt)
    n_ctx = len(options.tokens) + n_prompt
    read_before, start = disk_bytes(), time.perf_counter()
    shape = ContextShape(n_ctx=n_ctx, n_ubatch=options.n_ubatch, full_windows=True)
    with (
        opened(engine, options.path, options.placement, shape) as (model, tiers),
        model.context(
            n_ctx=n_ctx,
            n_batch=options.n_ubatch,
            n_ubatch=options.n_ubatch,
            n_threads=options.n_threads,
            flash_attention=options.flash_attention,
        ) as context,
    ):
        opened_s = time.perf_counter() - start
        counts = Counts(model, tiers)
        if options.waits and tiers is not None:
            tiers.drain()
        found: dict[str, Any] = {"open_s": opened_s, "ready_s": time.perf_counter() - start, "passes": []}
        found["ahead_at_first"] = tiers.stats().l2.ahead_fills if tiers is not None else 0
        for _ in range(2):
            context.forget()
            prompt_s = prefill(context, options.prompt, n_prompt) if n_prompt else 0.0
            seconds = decode(context, options.tokens, n_prompt)
            found["passes"].append(
                {
                    "prompt_s": prompt_s,
                    "steps_us": [round(s * 1e6) for s in seconds],
                    "counts": counts.take(),
                    "disk_bytes": disk_bytes() - read_before,
                }
            )
            found["replays"] = context.sample() == options.follows
            tell(found)
        if tiers is not None:
            tiers.drain()
            tiers.check_valid()


def main(given: dict[str, Any]) -> None:
    """Measure what was asked for."""
    measure(ColdOptions(**{**given, "placement": Placement(**given["placement"])}))


if __name__ == "__main__":
    sys.exit(answer(main))
