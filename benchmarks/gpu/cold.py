"""Cold starts: how soon a fresh process decodes as fast as a warm one, with and without a routing profile."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from expertier.planner.profiles.file import write_profile
from expertier.planner.profiles.routing_profile import profile_of
from expertier.planner.traces.trace import trace_from_ids
from expertier.tiers.model.table import ExpertTable
from gpu.child import run_child
from gpu.cold_run import ColdOptions
from gpu.models import BenchModel, model_routing
from gpu.opening import Placement
from gpu.report import print_table
from gpu.results import Results
from gpu.rows import Row
from gpu.settings import engine_settings, environment

COLD_ROWS = ("vram", "ours-50", "ours-50-l2-25", "ours-25", "ours-25-l2-25")
WAYS = ("without", "profile", "waited")
"""Without a profile; with one; and with one where the first token waits for all experts that it asks for."""

FILES = ("cached", "dropped")
"""Whether the page cache has the model's file at the start."""

FILLS = ("auto", "0", "1")
"""MOE_FILL_L2: whether L2 is filled from the file in the background."""

WINDOW = 50
GOOD = 0.9
FIRST = 200

_UBATCH = 512  # what llama-server begins with

_SCRIPT = Path(__file__).with_name("cold_run.py")
Say = Callable[[str], None]
Times = npt.NDArray[np.float64]


def measure_cold(
    options: argparse.Namespace,
    results: Results,
    model: BenchModel,
    *,
    say: Say,
    needs_no_run: Callable[[argparse.Namespace, Results, str, str, dict[str, Any]], bool],
) -> None:
    """Measure the model's cold starts that were not measured with the same settings.

    The tokens are the model's last tokens, and the profile is made of all tokens before them: the recording's earlier
    part.
    """
    begin = model.n_steps - options.cold_steps
    if begin < max(options.cold_prompt, 1):
        raise SystemExit(
            f"{model.name} replays {model.n_steps} steps, too few for {options.cold_steps} cold ones and a profile of "
            "those before: give more --steps, or fewer --cold-steps"
        )
    table = ExpertTable.from_gguf(model.path)
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "profile.npz"
        ids = model_routing(model, options.trace)[:begin]
        n_experts = max(layer.n_experts for layer in table.layers)
        write_profile(profile, profile_of(trace_from_ids(ids, n_experts=n_experts), "the steps before"))
        for name, file, way, fill in product(
            options.cold_rows, options.cold_files, options.cold_ways, options.cold_fill
        ):
            row = Row.parse(name)
            if row.side != "ours" and (way, fill) != (WAYS[0], options.cold_fill[0]):
                continue
            label = f"{model.name}/{name} {way} {file}" + (f" fill={fill}" if fill != FILLS[0] else "")
            asked = ColdOptions(
                path=model.path,
                placement=Placement(
                    row.side,
                    options.device,
                    row.cache_bytes(model, table) if row.side == "ours" else 0,
                    row.host_bytes(model, table) if row.side == "ours" else 0,
                ),
                prompt=model.tokens[begin - options.cold_prompt : begin],
                tokens=model.tokens[begin:],
                follows=model.tokens[0],
                profile=str(profile) if way != WAYS[0] else None,
                waits=way == "waited",
                fill=fill,
                is_cached=file == FILES[0],
                n_ubatch=min(options.ubatch, _UBATCH),
                **engine_settings(options),
            )
            settings = {**asdict(asked), "tokens": len(asked.tokens), "prompt": len(asked.prompt)}
            settings |= {"profile": begin if asked.profile else None}
            settings["environment"] = environment()
            if needs_no_run(options, results, "cold", label, settings):
                continue
            findings = run_child(_SCRIPT, asdict(asked), timeout_s=options.row_timeout)
            results.put("cold", label, settings, findings)
            say(f"cold start of {label}: " + str(findings.get("failed") or " ".join(_line("", findings))))


def until_warm(cold: Times, warm: Times) -> int | None:
    """Return after how many tokens a window of 50 first takes no more than a ninth longer than the same ones warm.

    The window itself is counted, so the best result is 50. None where no window is as fast.
    """
    ends = np.arange(WINDOW, len(cold) + 1)
    first, again = (np.cumsum(np.concatenate(([0.0], seconds))) for seconds in (cold, warm))
    took, takes = (total[ends] - total[ends - WINDOW] for total in (first, again))
    good = np.flatnonzero(takes >= GOOD * took)
    return int(ends[good[0]]) if len(good) else None


def print_cold(findings: dict[str, dict[str, Any]]) -> None:
    """Print a line for each cold start."""
    print(
        f"\ncold starts: windows of {WINDOW} tokens as shares of the same tokens' speed when warm, the first {FIRST} "
        f"in one; after how many tokens a window reaches {GOOD:.0%}, and the same against the warm speed of the last "
        f"{FIRST}; MB that the first and the second time read from the file; experts that L2 was filled with before "
        "the first token, and during the first time"
    )
    head = [
        "model/row, profile, file",
        "open s",
        "1st token s",
        "0-50",
        "-100",
        "-150",
        "-200",
        f"first {FIRST}",
    ]
    head += ["warm after", "or", "warm t/s", "file MB", "again", "disk MB", "ahead", "then"]
    print_table(
        head, [_line(name, found) for name, found in findings.items() if len(found.get("passes", ())) == 2]
    )
    for name, found in findings.items():
        if "failed" in found:
            print(f"{name} FAILED: {found['failed']}")
        elif not found["replays"]:
            print(
                f"{name}: the output is WRONG: after the last step, another token than the model's was likeliest"
            )


def _line(name: str, found: dict[str, Any]) -> list[str]:
    cold, warm = (np.array(each["steps_us"]) / 1e6 for each in found["passes"])
    windows = [slice(begin, begin + WINDOW) for begin in range(0, FIRST, WINDOW)]
    last = np.full(len(cold), float(warm[-FIRST:].mean()))
    files = [each["counts"].get("file.bytes_read", 0) / 1e6 for each in found["passes"]]
    return [
        name,
        f"{found['open_s']:.2f}",
        f"{found['ready_s'] + found['passes'][0]['prompt_s'] + cold[0]:.2f}",
        *(f"{warm[part].sum() / cold[part].sum():.2f}" if len(warm[part]) else "-" for part in windows),
        f"{warm[:FIRST].sum() / cold[:FIRST].sum():.2f}",
        _count(until_warm(cold, warm)),
        _count(until_warm(cold, last)),
        f"{len(warm) / warm.sum():.1f}",
        f"{files[0]:.0f}",
        f"{files[1]:.0f}",
        f"{found['passes'][0]['disk_bytes'] / 1e6:.0f}",
        str(found.get("ahead_at_first", "-")),
        str(found["passes"][0]["counts"].get("l2.ahead_fills", 0)),
    ]


def _count(tokens: int | None) -> str:
    return "never" if tokens is None else str(tokens)
