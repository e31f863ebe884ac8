"""`expertier replay`: recorded routing through policies side by side, against the offline optimum."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from expertier.cli import report
from expertier.errors import ConfigError
from expertier.planner.policy.kind import PolicyKind
from expertier.planner.replay.result import ReplayResult
from expertier.planner.traces.file import read_trace
from expertier.planner.traces.rows import join_rows
from expertier.planner.traces.trace import Phase, Trace
from expertier.units import MIB, mib

_KINDS = ", ".join(kind.value for kind in PolicyKind)


def replay(
    trace: Annotated[
        Path,
        typer.Argument(metavar="TRACE", help="Recorded routing: .npz, .npy or .csv.", show_default=False),
    ],
    slots: Annotated[int | None, typer.Option(metavar="N", help="Slots a layer.")] = None,
    budget_mib: Annotated[
        float | None,
        typer.Option(
            metavar="MIB", help="Instead of --slots: the size of L1, shared out as equal numbers of slots."
        ),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help=f"{_KINDS}, lru-global or belady; may be given several times; by default all.",
        ),
    ] = None,
    pool_mib: Annotated[float, typer.Option(metavar="MIB", help="L2 under L1.")] = 0,
    sequence: Annotated[
        int | None, typer.Option(metavar="N", help="Only this sequence of the file, counted from 0.")
    ] = None,
    cold: Annotated[
        bool,
        typer.Option(
            "--cold", help="Empty all tiers before each sequence, instead of playing one after another."
        ),
    ] = False,
    prefill_rows: Annotated[
        int, typer.Option(metavar="N", help="Join so many recorded steps of a prompt into one.")
    ] = 1,
    decode_rows: Annotated[
        int, typer.Option(metavar="N", help="The same for decode: several rows a step.")
    ] = 1,
    expert_bytes: Annotated[
        int | None, typer.Option(metavar="BYTES", help="Bytes of an expert, where TRACE has none.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Play recorded routing through eviction policies: what would have hit, and which bytes would have moved."""
    for option, value in (("--prefill-rows", prefill_rows), ("--decode-rows", decode_rows)):
        if value < 1:
            raise ConfigError(f"{option} is {value}: give 1 or more")
    if expert_bytes is not None and not 1 <= expert_bytes < 1 << 48:
        raise ConfigError(f"--expert-bytes is {expert_bytes}: give 1 or more, below 2^48")
    if (slots is None) == (budget_mib is None):
        raise ConfigError("give either --slots, a number a layer, or --budget-mib for all layers")
    calls = _prepared(read_trace(trace), trace, sequence, expert_bytes, prefill_rows, decode_rows)
    from expertier.planner.replay import run  # loads the compiler

    if slots is not None:
        l1 = run.l1_of_slots(calls, slots)
    else:
        assert budget_mib is not None
        l1 = run.l1_of_budget(calls, _bytes("--budget-mib", budget_mib))
    pool_bytes = _bytes("--pool-mib", pool_mib)
    names = list(dict.fromkeys(policy)) if policy else list(run.POLICIES)
    rows = run.compare(calls, l1, names, pool_bytes=pool_bytes, each_from_cold=cold)
    document = _document(trace, calls, l1.n_slots, l1.budget_bytes, pool_bytes, rows)
    if as_json:
        print(json.dumps(document))
    else:
        _print(document, Console())


def _prepared(
    recording: Trace,
    path: Path,
    sequence: int | None,
    expert_bytes: int | None,
    prefill_rows: int,
    decode_rows: int,
) -> Trace:
    """Return the part of the recording that is to be played, with its rows joined."""
    calls = recording
    if sequence is not None:
        if not 0 <= sequence < recording.n_sequences:
            raise ConfigError(
                f"sequence {sequence} of {path} was asked for; it has {recording.n_sequences}, counted from 0"
            )
        calls = recording.section(*recording.sequences[sequence : sequence + 2].tolist())
    if calls.n_calls == 0:
        raise ConfigError(f"{path}: nothing to play: no calls were recorded there")
    if expert_bytes is not None:
        if calls.expert_bytes is not None:
            raise ConfigError(f"{path} says itself how large its experts are; leave --expert-bytes out")
        calls = calls.with_bytes(expert_bytes)
    return join_rows(join_rows(calls, Phase.PREFILL, prefill_rows), Phase.DECODE, decode_rows)


def _bytes(option: str, n_mib: float) -> int:
    if not 0 <= n_mib < 1 << 40:
        raise ConfigError(f"{option} is {n_mib}: give a number of MiB, such as 4096")
    return int(n_mib * MIB)


def _document(
    path: Path,
    calls: Trace,
    n_slots: tuple[int, ...],
    l1_bytes: int,
    pool_bytes: int,
    rows: list[tuple[ReplayResult, float | None]],
) -> dict[str, Any]:
    """Return what `--json` prints; with one policy, its values stand at the top as well."""
    policies = [result.as_dict(closed) for result, closed in rows]
    has_bytes = calls.expert_bytes is not None
    document: dict[str, Any] = {
        "trace": str(path),
        "layers": calls.n_layers,
        "sequences": calls.n_sequences,
        "calls": calls.n_calls,
        "slots": list(n_slots),
        "l1_bytes": l1_bytes if has_bytes else None,
        "l2_bytes": pool_bytes,
        "notes": [],
        "policies": policies,
    }
    if 0 < pool_bytes < l1_bytes:
        document["notes"].append(
            f"L2 ({mib(pool_bytes)}) is smaller than L1 ({mib(l1_bytes)}): what L1 drops has mostly left it too"
        )
    longest = int(calls.lengths.max())
    if longest > min(n_slots):
        document["notes"].append(
            f"calls of up to {longest} experts do not fit {min(n_slots)} slots and run in groups, for which "
            "belady is a lower bound of misses that no policy may reach"
        )
    return {**policies[0], **document} if len(policies) == 1 else document


def _print(document: dict[str, Any], console: Console) -> None:
    """Print the policies as a table."""
    low, high = min(document["slots"]), max(document["slots"])
    fields = {
        "layers": document["layers"],
        "sequences": document["sequences"],
        "layer calls": f"{document['calls']:,}",
        "slots a layer": low if low == high else f"{low} to {high}",
        "L1": "-" if document["l1_bytes"] is None else mib(document["l1_bytes"]),
        "L2": mib(document["l2_bytes"]) if document["l2_bytes"] else "none",
    }
    report.print_fields(document["trace"], fields, console)
    console.print(
        _grid(
            ("policy", "hit rate", "decode", "prefill", "gap closed", "misses", "look-ups/s"),
            [
                (
                    row["policy"],
                    _percent(row["hit_rate"]),
                    _percent(row["decode_hit_rate"]),
                    _percent(row["prefill_hit_rate"]),
                    _percent(row["gap_closed"]),
                    f"{row['misses']:,}",
                    "-" if row["lookups_per_s"] is None else f"{row['lookups_per_s'] / 1e6:.1f} M",
                )
                for row in document["policies"]
            ],
        )
    )
    console.print(
        _grid(
            ("policy", "into L1", "from L2", "from the file", "left L1", "left L2"),
            [
                (
                    row["policy"],
                    *(
                        "-" if row[name] is None else mib(row[name])
                        for name in ("bytes_in", "bytes_l2_to_l1", "bytes_file_to_l2")
                    ),
                    f"{row['evictions']:,}",
                    f"{row['l2_evictions']:,}",
                )
                for row in document["policies"]
            ],
        )
    )
    console.print(f"of {document['policies'][0]['lookups']:,} look-ups", highlight=False)
    for note in document["notes"]:
        console.print(f"note: {report.escape(note)}", highlight=False, soft_wrap=True)


def _grid(headings: tuple[str, ...], rows: list[tuple[str, ...]]) -> Table:
    grid = Table(box=None, header_style="bold")
    for heading in headings:
        grid.add_column(heading, justify="left" if heading == "policy" else "right", no_wrap=True)
    for row in rows:
        grid.add_row(*row)
    return grid


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f} %"
