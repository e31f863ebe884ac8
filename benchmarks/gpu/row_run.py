"""Measures one row; run by `child` with `RowOptions` as JSON.

The steps: a warm prefill of every token that the model knows, so that each expert was read from the file once; then
decode with forced tokens; then prefills, each size twice; then decode again, to see what prefills evicted. All rows
are driven by the same calls.
"""

from __future__ import annotations

import re
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from expertier.engine_adapter.llama_cpp import LlamaContext, LlamaModel, LoadedEngine
from expertier.engine_adapter.open import open_engine
from expertier.planner.budget.context_memory import ContextShape
from expertier.tiers.tier_set import TierSet
from gpu.child import answer, tell
from gpu.opening import Placement, opened

_ENGINE_CACHE = re.compile(
    r"llama_moe_cache: (ubatch[ <>=0-9]+): hits = (\d+), misses = (\d+), hit rate = [0-9.]+%, uploaded = ([0-9.]+)"
)


@dataclass(frozen=True)
class RowOptions:
    """What to measure: tokens to decode, of which the first `warm` are not timed, and sizes of prefills."""

    path: str
    placement: Placement
    tokens: list[int]
    warm: int
    steps: int
    prefill_sizes: list[int]
    n_ctx: int
    n_ubatch: int
    n_threads: int
    flash_attention: str
    is_cold: bool
    llama_cpp: str | None


class Counts:
    """What the tiers and the proxy count, as differences between two moments."""

    def __init__(self, model: LlamaModel, tiers: TierSet | None) -> None:
        self._model = model
        self._tiers = tiers
        self._before = self._now()

    def take(self) -> dict[str, int]:
        """Return what was counted since the last call; empty for stock."""
        now = self._now()
        before, self._before = self._before, now
        return {name: value - before[name] for name, value in now.items() if value != before[name]}

    def _now(self) -> dict[str, int]:
        if self._tiers is None or self._model.binding is None:
            return {}
        flat = {f"proxy.{name}": value for name, value in self._model.binding.counters().as_dict().items()}
        for tier, numbers in self._tiers.stats().as_dict().items():
            flat |= {f"{tier}.{name}": value for name, value in numbers.items()}
        return flat


def decode(context: LlamaContext, tokens: Sequence[int], position: int = 0) -> list[float]:
    """Decode token by token; returns the seconds of each."""
    seconds = []
    for token in tokens:
        start = time.perf_counter()
        context.decode([token], position)
        seconds.append(time.perf_counter() - start)
        position += 1
    return seconds


def prefill(context: LlamaContext, tokens: Sequence[int], size: int, *, all_logits: bool = False) -> float:
    """Run a prompt of `size` tokens, which repeat, in an empty context; returns the seconds.

    Without logits of all, the engine runs the last layer's experts for the last token only.
    """
    prompt = (list(tokens) * (-(-size // len(tokens))))[:size]
    context.forget()
    start = time.perf_counter()
    for begin in range(0, size, context.n_batch):
        context.decode(prompt[begin : begin + context.n_batch], begin, all_logits=all_logits)
    return time.perf_counter() - start


def speeds(seconds: Sequence[float]) -> dict[str, Any]:
    """Put steps together."""
    return {
        "tokens_per_s": len(seconds) / sum(seconds),
        "median_ms": statistics.median(seconds) * 1e3,
        "p95_ms": sorted(seconds)[int(len(seconds) * 0.95)] * 1e3,
        "steps": len(seconds),
    }


def measure(engine: LoadedEngine, options: RowOptions) -> None:
    """Measure all and tell after each step."""
    found: dict[str, Any] = {}
    tokens = options.tokens
    start = time.perf_counter()
    shape = ContextShape(n_ctx=options.n_ctx, n_ubatch=options.n_ubatch, full_windows=True)
    with opened(engine, options.path, options.placement, shape) as (model, tiers):
        found["load_s"] = time.perf_counter() - start
        counts = Counts(model, tiers)
        context = model.context(
            n_ctx=options.n_ctx,
            n_batch=options.n_ubatch,
            n_ubatch=options.n_ubatch,
            n_threads=options.n_threads,
            flash_attention=options.flash_attention,
            moe_cache_bytes=options.placement.cache_bytes if options.placement.side == "cache" else 0,
        )
        with context:
            found["flash_attention"] = context.flash_attention_enabled
            found["n_graph_splits"] = context.n_graph_splits
            tell(found)
            if not options.is_cold:
                found["warm_prefill_s"] = prefill(context, tokens, len(tokens), all_logits=True)
                found["warm_prefill_counts"] = counts.take()
                context.forget()
                tell(found)
            warm = decode(context, tokens[: options.warm])
            found["warm_decode"] = {**speeds(warm), "counts": counts.take()} if warm else None
            timed = tokens[options.warm : options.warm + options.steps]
            seconds = decode(context, timed, options.warm)
            found["decode"] = {**speeds(seconds), "counts": counts.take()}
            found["decode_steps_us"] = [round(s * 1e6) for s in (*warm, *seconds)]
            # The model's output makes the next step's token the likeliest: a wrong result shows.
            ended_at = options.warm + len(timed)
            found["replays"] = context.sample() == tokens[ended_at % len(tokens)]
            tell(found)
            found["prefill"] = {}
            for size in options.prefill_sizes:
                first, second = prefill(context, tokens, size), prefill(context, tokens, size)
                found["prefill"][str(size)] = {
                    "first_tokens_per_s": size / first,
                    "tokens_per_s": size / second,
                    "counts": counts.take(),
                }
                tell(found)
            if options.prefill_sizes:
                context.forget()
                again = decode(context, timed[-64:])
                found["decode_after_prefill"] = {**speeds(again), "counts": counts.take()}
                tell(found)
            engine.take_log(0)
        found["engine_cache"] = engine_cache(engine.take_log(0))
        if tiers is not None:
            tiers.check_valid()
            found["stats"] = tiers.stats().as_dict()
            found["compute"] = compute_counts(model)
    tell(found)


def compute_counts(model: LlamaModel) -> dict[str, int] | None:
    """Return what the engine computes in of the slab, and the boundary's moves; None where it does so elsewhere."""
    counts = model.binding.compute_counts() if model.binding is not None else None
    return asdict(counts) if counts is not None else None


def engine_cache(log: str) -> dict[str, Any]:
    """Read what llama.cpp's own cache logs when its context is freed."""
    found: dict[str, Any] = {}
    for batch, hits, misses, mib in _ENGINE_CACHE.findall(log):
        found[" ".join(batch.split())] = {
            "hits": int(hits),
            "misses": int(misses),
            "uploaded_mib": float(mib),
        }
    copied = re.search(r"large batches: (\d+) experts copied from the cache, ([0-9.]+) MiB", log)
    if copied:
        found["copied"] = {"experts": int(copied[1]), "mib": float(copied[2])}
    return found


def main(given: dict[str, Any]) -> None:
    """Measure what was asked for."""
    options = RowOptions(**{**given, "placement": Placement(**given["placement"])})
    measure(open_engine(options.llama_cpp), options)


if __name__ == "__main__":
    sys.exit(answer(main))
