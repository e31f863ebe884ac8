"""Predicted against measured decode speed: a model that replays recorded routing, at three budgets.

    python benchmarks/prediction.py --trace FILE [--steps 200] [--threads 1] [--rounds 3] [--cpu-time] [--json]
    python benchmarks/prediction.py --trace FILE --llama-cpp DIR --device CUDA0 --pool [--ahead]

In each round the probe's models run, and then the model itself with a quarter, half and three quarters of the
experts in slots, so that other work on the machine slows both. The prediction knows the recording, and of the
machine only what the probe measured in that round. With `--pool`, L2 holds all experts.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from expertier.engine_adapter.llama_cpp import LoadedEngine
from expertier.engine_adapter.models.model_shape import ModelShape
from expertier.engine_adapter.models.trace_ids import read_trace_ids
from expertier.engine_adapter.models.trace_model import FIRST_TOKEN, default_width, write_trace_model
from expertier.engine_adapter.open import open_engine
from expertier.engine_adapter.tiered_model import TieredModel
from expertier.planner.budget.allocate import full_bytes
from expertier.planner.budget.context_memory import ContextShape
from expertier.planner.predict.hit_rates import FromTrace
from expertier.planner.predict.rates import MachineRates
from expertier.planner.predict.speed import Workload, predict
from expertier.planner.traces.trace import trace_from_ids
from expertier.probe.engine_rates import measure_engine
from expertier.tiers.config.config import TierConfig
from expertier.tiers.model.geometry import read_geometry
from expertier.tiers.model.table import ExpertTable

SHARES = (0.25, 0.5, 0.75)


def main() -> None:
    """Write the model, run the rounds, print predicted and measured speeds and their ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--n-ff", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="count processor time instead, for a busy machine; needs one thread",
    )
    parser.add_argument("--pool", action="store_true")
    parser.add_argument(
        "--ahead",
        action="store_true",
        help="fetch experts ahead while measuring, which the prediction does not cover",
    )
    parser.add_argument("--llama-cpp", type=Path)
    parser.add_argument("--device", default="CPU")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    ids = read_trace_ids(arguments.trace, steps=arguments.steps)
    n_layers, top_k = ids.shape[1:]
    n_experts = 1 << int(ids.max()).bit_length()
    width = default_width(n_layers, n_experts, "Q4_K")
    shape = ModelShape(
        layers=n_layers, experts=n_experts, top_k=top_k, n_embd=width, n_ff=arguments.n_ff, heads=width // 64,
        kv_heads=width // 64, head_dim=64, vocab=FIRST_TOKEN + len(ids), seed=0, gate_up_type="Q4_K", down_type="Q6_K",
        dense_type="Q8_0", context_length=2 * len(ids),
    )  # fmt: skip
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    engine = open_engine(arguments.llama_cpp)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        path = write_trace_model(Path(folder) / "model.gguf", ids, shape, repeat=True).path
        table, geometry = ExpertTable.from_gguf(path), read_geometry(path)
        demands = table.layer_demands()
        pool_bytes = 2 * full_bytes(demands) if arguments.pool else 0
        hits = FromTrace(demands, trace_from_ids(np.concatenate((ids, ids)), n_experts=n_experts))
        for number in range(arguments.rounds):
            probed = measure_engine(
                engine,
                lambda _: None,
                n_threads=arguments.threads,
                rounds=1,
                clock=clock,
                device=arguments.device,
            )
            rates = MachineRates(
                probed.decode, probed.prefill, probed.pool, probed.page_cache, probed.page_cache,
                probed.token_s, probed.lookup_s,
            )  # fmt: skip
            for share in SHARES[number % 3 :] + SHARES[: number % 3]:
                slots = [round(share * n_experts)] * n_layers
                work = Workload(
                    geometry,
                    demands,
                    slots,
                    ContextShape(2 * len(ids), len(ids), full_windows=True),
                    pool_bytes,
                    depth=len(ids) // 2,
                )
                predicted = predict(work, hits, rates)
                budget = sum(demand.bytes_for(n) for demand, n in zip(demands, slots, strict=True))
                config = TierConfig(
                    expert_cache_bytes=budget, host_pool_bytes=pool_bytes, engine_device=arguments.device,
                    decode_prefetch="auto" if arguments.ahead else 0,
                )  # fmt: skip
                measured, misses = _measure(engine, table, config, len(ids), arguments.threads, clock)
                row = {
                    "round": number, "slots": slots[0], "predicted": predicted.decode.predicted, "measured": measured,
                    "ratio": predicted.decode.predicted / measured, "compute_ms": 1e3 * predicted.compute_s,
                    "misses_predicted": hits.misses(slots).expected, "misses": misses, "rates": rates.as_dict(),
                }  # fmt: skip
                rows.append(row)
                if not arguments.json:
                    _print(row)
    medians, of_medians = {}, {}
    for n in (round(share * n_experts) for share in SHARES):
        found = [row for row in rows if row["slots"] == n]
        medians[n] = median(row["ratio"] for row in found)
        of_medians[n] = median(row["predicted"] for row in found) / median(row["measured"] for row in found)
    if arguments.json:
        print(json.dumps({"rows": rows, "median_of_ratios": medians, "ratio_of_medians": of_medians}))
    else:
        for name, ratios in (("median of the ratios", medians), ("ratio of the medians", of_medians)):
            print(f"{name}:", {n: round(ratio, 3) for n, ratio in ratios.items()})


def _measure(
    engine: LoadedEngine,
    table: ExpertTable,
    config: TierConfig,
    n_steps: int,
    n_threads: int,
    clock: Callable[[], float],
) -> tuple[float, float]:
    """Decode the recording twice; return tokens a second of the second time, and misses a token."""
    with (
        TieredModel.open(engine, table, config) as tiered,
        tiered.model.context(n_ctx=2 * n_steps, n_threads=n_threads) as context,
    ):
        for step in range(n_steps):  # fills the slots, and touches their memory for the first time
            context.decode([FIRST_TOKEN + step], step)
        context.forget()
        before = tiered.tiers.stats().l1.misses
        start = clock()
        for step in range(n_steps):
            context.decode([FIRST_TOKEN + step], step)
        seconds = clock() - start
        misses = tiered.tiers.stats().l1.misses - before
    return n_steps / seconds, misses / n_steps


def _print(row: dict[str, Any]) -> None:
    print(
        f"round {row['round']}, {row['slots']:3d} slots: predicted {row['predicted']:6.2f}, measured "
        f"{row['measured']:6.2f} tokens/s, ratio {row['ratio']:.3f}; misses a token {row['misses_predicted']:.2f}, "
        f"{row['misses']:.2f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
