"""`expertier profile make` and `show`: make routing profiles from recordings, and show their numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from expertier.atomic_file import check_output
from expertier.cli import report
from expertier.errors import ConfigError
from expertier.planner.profiles.file import read_profile, write_profile
from expertier.planner.profiles.routing_profile import default_phase, profile_of
from expertier.planner.profiles.summary import summarize
from expertier.planner.traces.file import read_trace
from expertier.planner.traces.trace import Phase

app = typer.Typer(help="Routing profiles: which experts a model uses most, for planning and a warm start.")

_PHASES: dict[str, Phase | None] = {"decode": Phase.DECODE, "prefill": Phase.PREFILL, "all": None}

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]


@app.command()
def make(
    trace: Annotated[
        Path,
        typer.Argument(
            metavar="TRACE",
            help="Recorded routing: --record-routing, .npz, .npy or .csv.",
            show_default=False,
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="PROFILE", help="The file to write.")],
    phase: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(_PHASES),
            help="The steps to count; by default decode, where the recording has decode.",
        ),
    ] = None,
    experts: Annotated[
        int | None,
        typer.Option(metavar="N", help="Experts of a layer, where TRACE has ids alone and not all occur."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Count a recording's uses and reuse distances into a profile, for MOE_PROFILE and --profile."""
    if phase is not None and phase not in _PHASES:
        raise ConfigError(f"--phase is {phase!r}: give one of {', '.join(_PHASES)}")
    check_output(output, "the profile")
    recorded = read_trace(trace)
    if experts is not None:
        recorded = recorded.with_experts(experts)
    profile = profile_of(recorded, str(trace), default_phase(recorded) if phase is None else _PHASES[phase])
    write_profile(output, profile)
    _say({"written": str(output), **summarize(profile)}, as_json)


@app.command()
def show(
    profile: Annotated[
        Path,
        typer.Argument(
            metavar="PROFILE",
            help="A profile, `blk.<layer> <weight>` or recorded routing.",
            show_default=False,
        ),
    ],
    as_json: Json = False,
) -> None:
    """Show how a profile spreads over layers and experts."""
    _say(summarize(read_profile(profile)), as_json)


def _say(document: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(document))
        return
    console = Console()
    if document["kind"] == "layers":
        report.print_fields(document["profile"], {"layers": document["layers"], "kind": "weights"}, console)
        _print_grid(
            console,
            ("layer", "weight"),
            [(f"blk.{row['block']}", row["weight"]) for row in document["per_layer"]],
        )
        return
    report.print_fields(
        document["profile"],
        {
            "layers": document["layers"],
            "layer calls": f"{document['calls']:,}",
            "uses": f"{document['uses']:,}",
        },
        console,
    )
    _print_grid(
        console,
        ("slots of the experts", "LRU would have hit", "the most used, held all the time"),
        [
            (_percent(float(fraction)), _percent(rate), _percent(document["held_hit_rates"][fraction]))
            for fraction, rate in document["lru_hit_rates"].items()
        ],
    )
    shares = list(document["per_layer"][0]["experts_for"])
    _print_grid(
        console,
        (
            "layer",
            "experts",
            "unused",
            "hottest",
            "its share",
            *(f"for {_percent(float(share))}" for share in shares),
            "median reuse",
        ),
        [
            (
                f"blk.{row['block']}",
                row["experts"],
                row["unused"],
                row["hottest"],
                _percent(row["hottest_share"]),
                *(row["experts_for"][share] for share in shares),
                row["median_reuse_distance"],
            )
            for row in document["per_layer"]
        ],
    )


def _print_grid(console: Console, headings: tuple[str, ...], rows: list[tuple[Any, ...]]) -> None:
    grid = Table(box=None, header_style="bold")
    for heading in headings:
        grid.add_column(heading, justify="right")
    for row in rows:
        grid.add_row(*("-" if cell is None else str(cell) for cell in row))
    console.print(grid)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.4g} %"
