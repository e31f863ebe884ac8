"""The engine with the experts in the tiers' slab on a GPU, against stock llama.cpp and its own cache of experts.

    python benchmarks/gpu_engine.py --llama-cpp DIR --trace FILE --folder DIR [--stages build models rows parity table]

Builds llama.cpp in DIR unless that is done, writes the models, runs every row in a process of its own, and prints one
table for each model. Results are saved in `--folder` (results.json) and not measured again, so the same command,
started once more, goes on. `--models`, `--rows`, `--steps`, `--prefill` make a run shorter; `--again` measures rows
anew.

Rows: `vram` all weights on the device; `ncmoe` stock with the experts on the CPU; `cache-P` llama.cpp's own cache of
experts and `ours-P` the tiers, each with P % of all expert bytes on the device; `ours-P-l2-P` with L2 smaller than all
experts. Tokens are forced: they replay recorded routing. `--parity` compares logits instead. `--device CPU --small`
tries everything without a GPU.

`--stages build models cold table` measures cold starts instead: the first tokens of a fresh process beside the same
tokens in a second pass, without a routing profile, with one of the model's steps before, and with one waited for.

`--devices 2` splits the layers over CUDA0 and CUDA1, stock's as well; a row's budget is for both together, and a row
with `@1` runs on the first of them alone. With MOE_SPLIT_MODE=tensor they share every tensor instead, which takes a
build with flash attention (`--cmake -DGGML_CUDA_FA=ON`); llama.cpp's own cache refuses that, so that the table compares
with `ncmoe` there.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpu.child import run_child
from gpu.cold import COLD_ROWS, FILES, FILLS, WAYS, WINDOW, measure_cold, print_cold
from gpu.llama_build import ensure_llama_cpp
from gpu.models import MODELS, BenchModel, ensure_model
from gpu.moves_run import MovesOptions
from gpu.opening import Placement
from gpu.parity import PARITY_MODELS, run_parity
from gpu.report import print_moves, print_parity, print_rows
from gpu.results import Results
from gpu.row_run import RowOptions
from gpu.rows import CPU_ROWS, GPU_ROWS, SPLIT_ROWS, TENSOR_ROWS, Row

from expertier.engine_adapter.open import prepare_engine
from expertier.tiers.config.config import TierConfig
from expertier.tiers.config.split_mode import SplitMode
from expertier.tiers.model.table import ExpertTable

_STAGES = ("build", "models", "rows", "moves", "cold", "parity", "table")
_STARTED = time.monotonic()
_MOVES_SCRIPT = Path(__file__).parent / "gpu" / "moves_run.py"
_ROW_SCRIPT = Path(__file__).parent / "gpu" / "row_run.py"


def say(message: str) -> None:
    """Tell what is going on."""
    print(f"[{time.strftime('%H:%M:%S')}] {message}", file=sys.stderr, flush=True)


def is_late(options: argparse.Namespace, name: str) -> bool:
    """Say and return whether the time for new measurements is over."""
    late = bool(time.monotonic() - _STARTED > options.stop_after)
    if late:
        say(f"{name} is left for the next start: --stop-after {options.stop_after:.0f}")
    return late


def build(options: argparse.Namespace, results: Results) -> None:
    """Build the engine and our plugin for it, and note what they are."""
    if options.llama_cpp is not None:
        cuda = options.device.startswith("CUDA")
        found = ensure_llama_cpp(options.llama_cpp, cuda=cuda, more=options.cmake, say=say)
        if found["built_s"] or "build" not in results.document:
            results.note("build", found)
    engine, plugin = prepare_engine(options.llama_cpp, say)  # not in a row's time
    results.note(
        "engine", {"engine": str(engine), "devices": plugin.info.devices, "sources": plugin.info.sources}
    )


def models(options: argparse.Namespace) -> list[BenchModel]:
    """Write the models that are not there."""
    options.folder.mkdir(parents=True, exist_ok=True)
    steps = options.warm + options.steps
    return [
        ensure_model(options.model_folder, name, steps=steps, trace=options.trace, say=say)
        for name in options.models
    ]


def run_row(options: argparse.Namespace, results: Results, model: BenchModel, row: Row) -> None:
    """Measure one row, unless it was measured with the same settings."""
    table = ExpertTable.from_gguf(model.path)
    has_budget = row.side in ("cache", "ours")
    placement = Placement(
        row.side,
        options.device.split(",")[0] if row.is_on_one else options.device,
        row.cache_bytes(model, table) if has_budget else 0,
        row.host_bytes(model, table) if row.side == "ours" else 0,
    )
    asked = RowOptions(
        path=model.path,
        placement=placement,
        tokens=model.tokens,
        warm=options.warm,
        steps=options.steps,
        prefill_sizes=options.prefill,
        n_ctx=options.ctx,
        n_ubatch=options.ubatch,
        n_threads=options.threads,
        flash_attention=options.flash_attention,
        is_cold=options.cold,
        llama_cpp=str(options.llama_cpp) if options.llama_cpp else None,
    )
    settings = {key: value for key, value in asdict(asked).items() if key != "tokens"}
    settings["environment"] = environment()
    name = f"{model.name}/{row.name}" + (f" {options.label}" if options.label and row.side == "ours" else "")
    if not options.again and results.find("rows", name, settings):
        return
    if is_late(options, name):
        return
    findings = run_child(_ROW_SCRIPT, asdict(asked), timeout_s=options.row_timeout)
    findings |= {
        "side": row.side,
        "percent": row.percent,
        "cache_bytes": placement.cache_bytes,
        "decoded": options.warm + options.steps + (min(64, options.steps) if options.prefill else 0),
    }
    results.put("rows", name, settings, findings)
    told = findings.get("decode", {}).get("tokens_per_s")
    prefills = {size: round(found["tokens_per_s"]) for size, found in findings.get("prefill", {}).items()}
    say(
        f"{name}: "
        + (f"{told:.1f} t/s, prefills {prefills}, {findings['wall_s']:.0f} s" if told else "no decode")
        + (f", FAILED: {findings['failed']}" if "failed" in findings else "")
    )


def moves(options: argparse.Namespace, results: Results, model: BenchModel) -> None:
    """Measure what the boundary's moves cost this model, unless that was measured with the same settings."""
    table = ExpertTable.from_gguf(model.path)
    row = Row.parse(f"ours-{options.moves_percent}")
    asked = MovesOptions(
        path=model.path,
        placement=Placement(
            "ours", options.device, row.cache_bytes(model, table), row.host_bytes(model, table)
        ),
        tokens=model.tokens,
        rounds=options.rounds,
        n_prefill=options.ubatch,
        n_ctx=options.ctx,
        n_threads=options.threads,
        flash_attention=options.flash_attention,
        llama_cpp=str(options.llama_cpp) if options.llama_cpp else None,
    )
    settings = {key: value for key, value in asdict(asked).items() if key != "tokens"}
    name = f"{model.name}/{row.name}"
    if not options.again and results.find("moves", name, settings):
        return
    if is_late(options, f"moves of {name}"):
        return
    findings = run_child(_MOVES_SCRIPT, asdict(asked), timeout_s=options.row_timeout)
    results.put("moves", name, settings, findings)
    say(f"moves of {name}: " + (f"FAILED: {findings['failed']}" if "failed" in findings else "measured"))


def environment() -> dict[str, str]:
    """Return the variables that the tiers go by."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith("MOE_")}


def parity(options: argparse.Namespace, results: Results) -> None:
    """Compare logits for every small model, in narrow and wide micro-batches."""
    for n_ubatch in options.parity_ubatch:
        for name in options.parity_models:
            settings = {
                "device": options.device,
                "slots": options.slots,
                "first_difference": options.first_difference,
                "environment": environment(),
                "flash_attention": options.flash_attention,
                "threads": options.threads,
                "llama_cpp": str(options.llama_cpp),
            }
            label = f"{name}, ubatch {n_ubatch}"
            if not options.again and results.find("parity", label, settings):
                continue
            if is_late(options, f"parity of {label}"):
                return
            cases = run_parity(name, options, n_ubatch, options.slots, say)
            failed = [case for case, found in cases.items() if "failed" in found]
            findings: dict[str, Any] = {"cases": cases}
            if failed:
                findings["failed"] = f"failed with {', '.join(failed)}"
            results.put("parity", label, settings, findings)


def print_all(options: argparse.Namespace, results: Results) -> None:
    """Print every table that there are findings for."""
    document = results.document
    if options.json:
        print(json.dumps(document))
        return
    for key in ("machine", "build", "engine"):
        print(f"{key}: {json.dumps(document.get(key))}")
    for model in document.get("models", {}).values():
        prefix = f"{model['name']}/"
        found = {
            name.removeprefix(prefix): row
            for name, row in document.get("rows", {}).items()
            if name.startswith(prefix) and row["settings"]["path"] == model["path"]
        }
        if found:
            in_order = dict(sorted(found.items(), key=lambda item: row_order(item[0])))
            print_rows(model, in_order, options.link_gbs)
    for name, findings in document.get("moves", {}).items():
        print_moves(name, findings)
    if document.get("cold"):
        print_cold(document["cold"])
    for label, findings in document.get("parity", {}).items():
        print_parity(label, findings["cases"])


def row_order(name: str) -> tuple[int, str]:
    """Order rows as the table has them, with labelled ones after those without, and others last."""
    row, rows = name.partition(" ")[0], (*SPLIT_ROWS, *GPU_ROWS)
    return rows.index(row) if row in rows else len(rows), name


def machine() -> dict[str, Any]:
    """Say what this runs on."""
    try:
        query = [
            "nvidia-smi",
            "--query-gpu=name,memory.total,driver_version,pcie.link.gen.max",
            "--format=csv,noheader",
        ]
        gpu = subprocess.run(query, capture_output=True, text=True, check=False, timeout=30).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        gpu = ""
    return {"gpu": gpu, "system": platform.platform(), "python": platform.python_version()}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the options, and give those of a small run to what was not given."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder", type=Path, required=True, help="For results.json and, by default, the models."
    )
    parser.add_argument("--model-folder", type=Path, help="For the models: some 6, 10 or 16 GB each.")
    parser.add_argument("--stages", nargs="+", choices=_STAGES, default=["build", "models", "rows", "table"])
    parser.add_argument(
        "--llama-cpp", type=Path, help="A source folder, built or not; else the installed wheel."
    )
    parser.add_argument(
        "--cmake", action="append", default=[], metavar="-DX=Y", help="One more option of the build."
    )
    parser.add_argument("--trace", type=Path, help="Recorded gpt-oss-20b routing (see `expertier synth`).")
    parser.add_argument("--device", default="CUDA0", help="The engine's name of the device.")
    parser.add_argument(
        "--devices", type=int, default=1, metavar="N", help="Split the layers over so many from --device on."
    )
    parser.add_argument("--small", action="store_true", help="A tiny model and short runs.")
    parser.add_argument("--models", nargs="+", choices=MODELS)
    parser.add_argument(
        "--rows",
        nargs="+",
        metavar="ROW",
        help="The rows to measure, also rows that the table does not have by default.",
    )
    parser.add_argument("--label", help="Told of our rows, to measure them with other MOE_ variables beside.")
    parser.add_argument("--steps", type=int, help="Timed decode steps.")
    parser.add_argument("--warm", type=int, help="Decode steps before them.")
    parser.add_argument("--prefill", type=int, nargs="*", help="Tokens of the prefills.")
    parser.add_argument("--ctx", type=int)
    parser.add_argument("--ubatch", type=int)
    parser.add_argument("--threads", type=int, default=0, help="0: one for each processor.")
    parser.add_argument("--flash-attention", choices=("auto", "on", "off"), default="auto")
    parser.add_argument(
        "--moves-percent", type=int, default=50, help="Stage `moves`: slots, in percent of all expert bytes."
    )
    parser.add_argument(
        "--rounds", type=int, default=8, help="Stage `moves`: how often the boundary moves there and back."
    )
    parser.add_argument(
        "--cold-rows", nargs="+", metavar="ROW", default=COLD_ROWS, help="Stage `cold`: which rows."
    )
    parser.add_argument("--cold-ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--cold-files", nargs="+", choices=FILES, default=FILES)
    parser.add_argument(
        "--cold-fill", nargs="+", choices=FILLS, default=FILLS[:1], help="Stage `cold`: MOE_FILL_L2."
    )
    parser.add_argument(
        "--cold-steps", type=int, help="Tokens of a cold start; the profile is of those before."
    )
    parser.add_argument("--cold-prompt", type=int, default=0, help="Tokens of a prompt before them.")
    parser.add_argument("--cold", action="store_true", help="Decode without the warm prefill before it.")
    parser.add_argument("--row-timeout", type=float, default=240, metavar="SECONDS")
    parser.add_argument(
        "--stop-after",
        type=float,
        default=float("inf"),
        metavar="SECONDS",
        help="Begin no measurement after so many seconds.",
    )
    parser.add_argument("--again", action="store_true", help="Measure again what was measured already.")
    parser.add_argument(
        "--parity", action="store_true", help="Only compare logits: --stages build parity table."
    )
    parser.add_argument("--parity-models", nargs="+", choices=PARITY_MODELS, default=list(PARITY_MODELS))
    parser.add_argument("--parity-ubatch", type=int, nargs="+", default=[64, 512])
    parser.add_argument(
        "--slots", type=int, nargs="+", help="Slots a layer to compare; else from top-k to all."
    )
    parser.add_argument(
        "--link-gbs", type=float, help="Speed of copies to the device, for the table's bound."
    )
    parser.add_argument(
        "--first-difference",
        action="store_true",
        help="Where logits differ, find the first tensor that does.",
    )
    parser.add_argument("--json", action="store_true", help="Print everything as JSON instead of tables.")
    options = parser.parse_args(arguments)
    if options.devices > 1:
        kind = options.device.rstrip("0123456789")
        if kind == options.device:
            parser.error(f"--devices {options.devices} counts up from a number, as in CUDA0: {kind} has none")
        first = int(options.device.removeprefix(kind))
        options.device = ",".join(f"{kind}{first + i}" for i in range(options.devices))
    several = SPLIT_ROWS
    if options.devices > 1 and TierConfig.from_env().split_mode is SplitMode.TENSOR:
        several = TENSOR_ROWS
        if refused := [row for row in options.rows or () if row.startswith("cache") and "@" not in row]:
            parser.error(
                f"MOE_SPLIT_MODE=tensor has no rows {', '.join(refused)}: llama.cpp's own cache refuses it"
            )
    small = options.small
    defaults = {
        "model_folder": options.folder,
        "models": ["small"] if small else ["gptoss", "qwen"],
        "rows": CPU_ROWS if options.device == "CPU" else several if options.devices > 1 else GPU_ROWS,
        "steps": 48 if small else 808,
        "warm": 16 if small else 100,
        "cold_steps": WINDOW if small else 600,
        "prefill": [64, 256] if small else [512, 2048, 16384],
        "ctx": 512 if small else 20480,
        "ubatch": 128 if small else 2048,
    }
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.parity:
        options.stages = ["build", "parity", "table"]
    return options


def main() -> None:
    """Run the stages that were asked for."""
    options = parse()
    rows = [Row.parse(name) for name in options.rows]
    for folder in (options.folder, options.model_folder):
        folder.mkdir(parents=True, exist_ok=True)
    results = Results(options.folder / "results.json")
    results.note("machine", machine())
    if "build" in options.stages:
        build(options, results)
    if {"models", "rows", "moves", "cold"} & set(options.stages):
        for model in models(options):
            results.put("models", model.name, {}, asdict(model))
            if "rows" in options.stages:
                for row in rows:
                    run_row(options, results, model, row)
            if "moves" in options.stages:
                moves(options, results, model)
            if "cold" in options.stages:
                measure_cold(options, results, model, say=say, is_late=is_late)
    if "parity" in options.stages:
        parity(options, results)
    if "table" in options.stages:
        print_all(options, results)


if __name__ == "__main__":
    main()
