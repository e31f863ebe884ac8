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
import platform
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpu.child import run_child
from gpu.cold import measure_cold, print_cold
from gpu.llama_build import ensure_llama_cpp
from gpu.models import BenchModel, ensure_model
from gpu.moves_run import MovesOptions
from gpu.opening import Placement
from gpu.options import parse
from gpu.parity import run_parity
from gpu.report import print_moves, print_parity, print_rows
from gpu.results import Results
from gpu.row_run import RowOptions
from gpu.rows import GPU_ROWS, SPLIT_ROWS, Row
from gpu.settings import engine_settings, environment

from expertier.engine_adapter.open import prepare_engine
from expertier.tiers.model.table import ExpertTable

_STARTED = time.monotonic()
_MOVES_SCRIPT = Path(__file__).parent / "gpu" / "moves_run.py"
_ROW_SCRIPT = Path(__file__).parent / "gpu" / "row_run.py"


def say(message: str) -> None:
    """Tell what is going on."""
    print(f"[{time.strftime('%H:%M:%S')}] {message}", file=sys.stderr, flush=True)


def needs_no_run(
    options: argparse.Namespace, results: Results, section: str, name: str, settings: dict[str, Any]
) -> bool:
    """Return whether something was measured with the same settings, or the time for new measurements is over."""
    if not options.again and results.find(section, name, settings):
        return True
    late = bool(time.monotonic() - _STARTED > options.stop_after)
    if late:
        what = name if section in ("rows", "cold") else f"{section} of {name}"
        say(f"{what} is left for the next start: --stop-after {options.stop_after:.0f}")
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
        is_cold=options.cold,
        **engine_settings(options),
    )
    settings = {key: value for key, value in asdict(asked).items() if key != "tokens"}
    settings["environment"] = environment()
    name = f"{model.name}/{row.name}" + (f" {options.label}" if options.label and row.side == "ours" else "")
    if needs_no_run(options, results, "rows", name, settings):
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
        **engine_settings(options),
    )
    settings = {key: value for key, value in asdict(asked).items() if key != "tokens"}
    name = f"{model.name}/{row.name}"
    if needs_no_run(options, results, "moves", name, settings):
        return
    findings = run_child(_MOVES_SCRIPT, asdict(asked), timeout_s=options.row_timeout)
    results.put("moves", name, settings, findings)
    say(f"moves of {name}: " + (f"FAILED: {findings['failed']}" if "failed" in findings else "measured"))


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
            if needs_no_run(options, results, "parity", label, settings):
                continue
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


def main() -> None:
    """Run the stages that were asked for."""
    options = parse(__doc__ or "")
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
                measure_cold(options, results, model, say=say, needs_no_run=needs_no_run)
    if "parity" in options.stages:
        parity(options, results)
    if "table" in options.stages:
        print_all(options, results)


if __name__ == "__main__":
    main()
