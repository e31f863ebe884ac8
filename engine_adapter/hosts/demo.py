"""The demonstration: compares a random model on stock llama.cpp and through the tiers, each in its own process.

stock            the engine with its own defaults
stock_norepack   the engine with weight repacking off, whose output the tiers' output must equal bit for bit
tiers            L1 and L2 at a quarter of the expert bytes each
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from expertier.engine_adapter.hosts.measured_run import RunOptions, RunResult, run_in_child
from expertier.engine_adapter.models.model_shape import ModelShape
from expertier.engine_adapter.models.synth import DEMO_SHAPE, write_model
from expertier.engine_adapter.open import prepare_engine
from expertier.temporary_folder import temporary_folder
from expertier.tiers.model.table import ExpertTable
from expertier.units import MIB, mib

PROMPT_TOKENS = 300
DECODE_TOKENS = 128
BUDGET_SHARE = 4  # L1 and L2 each get the expert bytes divided by this
RSS_SLACK_BYTES = 200 * MIB

Progress = Callable[[str], None]


@dataclass(frozen=True)
class DemoReport:
    """What the demo measured, and every check that failed."""

    document: dict[str, Any]
    broken: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether the output was bit-identical and every limit held."""
        return not self.broken


def run_demo(
    progress: Progress, *, shape: ModelShape = DEMO_SHAPE, llama_cpp: str | os.PathLike[str] | None = None
) -> DemoReport:
    """Generate the model, run it three times and compare.

    Raises:
        EngineError: there is no engine, or one of the runs failed.
    """
    prepare_engine(llama_cpp, progress)
    with temporary_folder(
        "expertier-demo-", "the demonstration", needed_bytes=_needed_bytes(shape)
    ) as folder:
        model = folder / "random-qwen3moe.gguf"
        progress(f"writing a random model, {mib(shape.expert_bytes_total)} of it experts")
        write_model(model, shape)
        table = ExpertTable.from_gguf(model)
        budget = table.expert_bytes_total // BUDGET_SHARE
        random = np.random.default_rng(7)
        base = RunOptions(
            model=str(model),
            prompt=[1, *random.integers(259, shape.vocab, PROMPT_TOKENS - 1).tolist()],
            n_tokens=DECODE_TOKENS,
            llama_cpp=os.fspath(llama_cpp) if llama_cpp is not None else None,
        )
        runs: dict[str, RunResult] = {}
        logits = {name: folder / f"{name}.npy" for name in ("stock_norepack", "tiers")}
        for name, options in {
            "stock": dataclasses.replace(base, repack=True),
            "stock_norepack": dataclasses.replace(base, logits_path=str(logits["stock_norepack"])),
            "tiers": dataclasses.replace(
                base,
                tiers=True,
                expert_cache_bytes=budget,
                host_pool_bytes=budget,
                logits_path=str(logits["tiers"]),
            ),
        }.items():
            progress(f"running {PROMPT_TOKENS} + {DECODE_TOKENS} tokens: {name}")
            runs[name] = run_in_child(options)
        stock_logits, tiers_logits = (np.load(path) for path in logits.values())
    return _report(table, runs, stock_logits, tiers_logits)


def _needed_bytes(shape: ModelShape) -> int:
    """Return the bytes that the demonstration writes: experts, a tenth more for all other tensors, two runs' logits."""
    logits = 2 * 4 * (PROMPT_TOKENS + DECODE_TOKENS) * shape.vocab
    return shape.expert_bytes_total * 11 // 10 + logits


def _report(
    table: ExpertTable, runs: dict[str, RunResult], stock_logits: Any, tiers_logits: Any
) -> DemoReport:
    stock, tiers = runs["stock_norepack"], runs["tiers"]
    identical = (
        stock_logits.shape == tiers_logits.shape
        and stock_logits.tobytes() == tiers_logits.tobytes()
        and stock.tokens == tiers.tokens
    )
    l1, l2, file = tiers.stats["l1"], tiers.stats["l2"], tiers.stats["file"]
    rss_limit = (
        stock.rss_peak_bytes
        - table.expert_bytes_total
        + l1["budget_bytes"]
        + l2["budget_bytes"]
        + RSS_SLACK_BYTES
    )
    document = {
        "model": {
            "layers": len(table.layers),
            "experts": table.layers[0].n_experts,
            "top_k": table.top_k,
            "expert_bytes": table.expert_bytes_total,
            "file_bytes": table.file_bytes,
        },
        "parity": {
            "bit_identical": identical,
            "prefill_tokens": PROMPT_TOKENS,
            "decode_tokens": len(tiers.tokens),
            "largest_difference": _largest_difference(stock_logits, tiers_logits),
        },
        "tokens_per_s": {name: run.decode_tokens_per_s for name, run in runs.items()},
        "prefill_tokens_per_s": {name: run.prefill_tokens_per_s for name, run in runs.items()},
        "l1": l1,
        "l2": l2,
        "file": file,
        "load": {
            "expert_bytes_read": tiers.load["expert_bytes"],
            "bytes_read": tiers.load["bytes_read"],
            "expert_bytes_skipped": tiers.proxy["dropped_writes"],
        },
        "rss_peak_bytes": tiers.rss_peak_bytes,
        "rss_limit_bytes": rss_limit,
        "rss_stock_bytes": stock.rss_peak_bytes,
        "lookup_us": tiers.proxy["lookup_ns"] / 1000 / max(tiers.proxy["lookups"], 1),
        "graph_splits": {name: run.n_graph_splits for name, run in runs.items()},
        "flash_attention": {name: run.flash_attention for name, run in runs.items()},
        "proxy": tiers.proxy,
        "plugin": tiers.plugin,
    }
    broken = [
        message
        for holds, message in (
            (identical, "the logits differ from the stock engine's"),
            (l1["used_bytes"] <= l1["budget_bytes"], "L1 is larger than its budget"),
            (l2["peak_bytes"] <= l2["budget_bytes"], "L2 was larger than its budget"),
            (tiers.load["expert_bytes"] == 0, "expert bytes were read while loading"),
            (tiers.rss_peak_bytes <= rss_limit, "peak RSS is above its limit"),
        )
        if not holds
    ]
    return DemoReport(document, tuple(broken))


def _largest_difference(left: Any, right: Any) -> float | None:
    if left.shape != right.shape:
        return None
    return float(np.max(np.abs(left - right)))
