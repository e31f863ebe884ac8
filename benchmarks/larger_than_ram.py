"""Decoding a model that is larger than the RAM: through the tiers and with stock llama.cpp, side by side in one run.

    python benchmarks/larger_than_ram.py --trace FILE [--ram-mib 2048 --expert-mib 3072] --json

Writes a model that replays recorded routing (`expertier synth`, gpt-oss-20b's layers and experts), and runs each side
in a process of its own under a limit on memory that counts the page cache (`memory_limit.py`), so that all sides have
the same RAM. The file is dropped from the page cache before each run. The sides take turns, so that other work on the
machine affects all of them. `stock-mmap-unlimited` has all free RAM and shows what the processor alone would allow.

Beside tokens/s, each side's share of what the disk allows: the speed of random reads of the same spans by four threads
under the same limit, divided by the bytes of the experts that a token uses (`of_all_from_disk`, above 1 where RAM
helps) and by those that this side really had read a token (`of_its_reads`). How much a page fault reads is up to the
disk's read-ahead, which is printed: stock with mmap depends on it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from disk_speed import drop_from_cache
from memory_limit import MemoryLimit, NoLimit

from expertier.engine_adapter.llama_cpp.skeleton import ensure_skeleton
from expertier.engine_adapter.models.model_shape import ModelShape
from expertier.engine_adapter.models.trace_ids import read_trace_ids
from expertier.engine_adapter.models.trace_model import write_trace_model
from expertier.engine_adapter.open import prepare_engine
from expertier.tiers.model.table import ExpertTable

_UNLIMITED = "-unlimited"
SIDES = ("tiers-auto", "stock-mmap", "stock-dio", "stock-none", f"stock-mmap{_UNLIMITED}")
_N_FF_STEP = 256
_TIMEOUT_S = 900
_OTHER_MIB = (
    384  # of the limit: the process itself, dense weights, key-value cache, buffers; some 260 were used
)


def shape_of(expert_mib: int, n_experts: int, n_layers: int) -> ModelShape:
    """Return a shape as wide as its codes need, with about so many MiB of experts."""
    n_embd = -(-n_layers * n_experts // 256) * 256

    def shape(n_ff: int) -> ModelShape:
        return ModelShape(
            layers=n_layers, experts=n_experts, top_k=1, n_embd=n_embd, n_ff=n_ff, heads=n_embd // 64,
            kv_heads=n_embd // 64, head_dim=64, vocab=300, seed=0, gate_up_type="Q4_K", down_type="Q6_K",
            dense_type="Q8_0",
        )  # fmt: skip

    steps = round((expert_mib << 20) / shape(_N_FF_STEP).expert_bytes_total)
    return shape(max(steps, 1) * _N_FF_STEP)


def run_side(
    limit: MemoryLimit | NoLimit, side: str, model: Path, options: argparse.Namespace
) -> dict[str, Any]:
    """Run one side under the limit; `failed` says why there is no speed."""
    if side.endswith(_UNLIMITED):
        found = run_side(NoLimit(), side.removesuffix(_UNLIMITED), model, options)
        return {**found, "side": side}
    drop_from_cache(str(model))
    killed_before = limit.kills()
    child = limit.run(
        [
            sys.executable,
            str(Path(__file__).with_name("decode_side.py")),
            side,
            str(model),
            *("--steps", str(options.steps), "--warm", str(options.warm)),
            *("--threads", str(options.threads), "--cache-mib", str(options.cache_mib)),
        ],
        timeout_s=_TIMEOUT_S,
    )
    if child.returncode == 0:
        return dict(json.loads(child.stdout.splitlines()[-1]))
    if limit.kills() > killed_before or child.returncode in (-9, 137):
        return {"side": side, "failed": "killed: it needs more memory than the limit"}
    return {"side": side, "failed": (child.stderr or child.stdout).strip()[-400:]}


def disk_speeds(limit: MemoryLimit | NoLimit, model: Path, span_bytes: int) -> dict[str, float]:
    """Measure the disk under the limit, with spans of an expert's matrix."""
    script = str(Path(__file__).with_name("disk_speed.py"))
    child = limit.run(
        [sys.executable, script, str(model), "--span-kib", str(span_bytes >> 10), "--json"], timeout_s=120
    )
    if child.returncode != 0:
        raise SystemExit(f"the disk could not be measured: {child.stderr.strip()[-400:]}")
    return dict(json.loads(child.stdout))


def read_ahead_kib(path: Path) -> int | None:
    """Return what the kernel reads ahead on the file's disk, in KiB; None where it does not say."""
    device = path.stat().st_dev
    for name in ("queue", "../queue"):  # of a whole disk, or of a partition's
        file = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/{name}/read_ahead_kb")
        if file.exists():
            return int(file.read_text())
    return None


def summary(
    side: str, runs: list[dict[str, Any]], speed_mib: float, bytes_a_token: int, base: float
) -> dict[str, Any]:
    """Put a side's runs together: medians, and how they compare."""
    failures = [run["failed"] for run in runs if "failed" in run]
    if failures:
        return {"side": side, "failed": failures[0]}
    tokens_per_s = statistics.median(run["tokens_per_s"] for run in runs)
    read = statistics.median(run["disk_bytes_a_token"] for run in runs)
    return {
        "side": side,
        "tokens_per_s": tokens_per_s,
        "all": [run["tokens_per_s"] for run in runs],
        "to_stock_mmap": tokens_per_s / base if base else None,
        "disk_mib_a_token": read / (1 << 20),
        "of_all_from_disk": tokens_per_s * bytes_a_token / (speed_mib * (1 << 20)),
        "of_its_reads": tokens_per_s * read / (speed_mib * (1 << 20)),
        "replayed": all(run["replayed"] for run in runs),
        "hit_rate": runs[-1].get("hit_rate"),
        "slots": runs[-1].get("slots"),
        "major_faults_a_token": runs[-1]["major_faults"] / runs[-1]["steps"],
        "rss_peak_mib": runs[-1]["rss_peak_mib"],
        "load_s": statistics.median(run["load_s"] for run in runs),
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Write the model, run all sides in turn, and return everything that was measured."""
    prepare_engine(None, lambda message: print(message, file=sys.stderr))
    with ExitStack() as stack:
        folder = options.folder or stack.enter_context(tempfile.TemporaryDirectory(prefix="expertier-ram-"))
        ids = read_trace_ids(options.trace, steps=options.warm + options.steps + 8)
        shape = shape_of(options.expert_mib, 1 << int(ids.max()).bit_length(), ids.shape[1])
        model = Path(folder) / f"trace-{shape.expert_bytes_total >> 20}-{len(ids)}.gguf"
        if not model.exists():
            write_trace_model(model, ids, shape, repeat=True)
        table = ExpertTable.from_gguf(model)
        ensure_skeleton(table)
        bytes_a_token = (
            ids.shape[1] * ids.shape[2] * table.expert_bytes_total // (ids.shape[1] * shape.experts)
        )
        span = table.expert_bytes_total // (ids.shape[1] * shape.experts * 3)
        limit = stack.enter_context(NoLimit() if options.limited else MemoryLimit(options.ram_mib << 20))
        disk = disk_speeds(limit, model, span)
        runs: dict[str, list[dict[str, Any]]] = {side: [] for side in options.sides}
        for number in range(options.rounds):
            for side in options.sides:
                if any("failed" in run for run in runs[side]):
                    continue
                runs[side].append(run_side(limit, side, model, options))
                print(f"round {number + 1}: {runs[side][-1]}", file=sys.stderr, flush=True)
        disk_after = disk_speeds(limit, model, span)
        speed = max(*disk.values(), *disk_after.values())
        base_runs = [run["tokens_per_s"] for run in runs.get("stock-mmap", []) if "failed" not in run]
        base = statistics.median(base_runs) if base_runs else 0.0
        return {
            "ram_mib": options.ram_mib,
            "limit": {0: "inherited", 1: "cgroup v1", 2: "cgroup v2"}[limit.version],
            "model_mib": model.stat().st_size / (1 << 20),
            "model_to_ram": model.stat().st_size / (options.ram_mib << 20),
            "mib_a_token": bytes_a_token / (1 << 20),
            "span_kib": span >> 10,
            "read_ahead_kib": read_ahead_kib(model),
            "disk_before": disk,
            "disk_after": disk_after,
            "tokens_per_s_all_from_disk": speed * (1 << 20) / bytes_a_token,
            "sides": [summary(side, found, speed, bytes_a_token, base) for side, found in runs.items()],
        }


def print_document(document: dict[str, Any]) -> None:
    """Print for a person."""
    print(
        f"{document['model_mib']:.0f} MiB model, {document['ram_mib']} MiB of RAM ({document['limit']}): "
        f"{document['model_to_ram']:.2f} times; a token uses {document['mib_a_token']:.0f} MiB of experts; "
        f"read-ahead {document['read_ahead_kib']} KiB"
    )
    for name in ("disk_before", "disk_after"):
        print(f"{name}: " + ", ".join(f"{key} {value:.0f} MiB/s" for key, value in document[name].items()))
    for side in document["sides"]:
        if "failed" in side:
            print(f"{side['side']:16} {side['failed']}")
            continue
        ratio = f"{side['to_stock_mmap']:.2f}" if side["to_stock_mmap"] else "-"
        print(
            f"{side['side']:16} {side['tokens_per_s']:7.2f} tokens/s, {ratio} times stock mmap; reads "
            f"{side['disk_mib_a_token']:.0f} MiB a token, {side['of_its_reads']:.2f} of the disk's speed, "
            f"{side['of_all_from_disk']:.2f} of all from disk"
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--ram-mib", type=int, default=2048)
    parser.add_argument("--expert-mib", type=int, default=3072)
    parser.add_argument(
        "--cache-mib", type=int, help=f"L1 of the tiers; else the RAM without {_OTHER_MIB} MiB"
    )
    parser.add_argument("--sides", nargs="+", default=list(SIDES))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warm", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="Keep the model here, and use it again.")
    parser.add_argument("--limited", action="store_true", help="This process already runs under the limit.")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    options.cache_mib = options.cache_mib or options.ram_mib - _OTHER_MIB
    document = measure(options)
    if options.json:
        print(json.dumps(document))
    else:
        print_document(document)


if __name__ == "__main__":
    main()
