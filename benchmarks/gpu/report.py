"""Prints the findings as plain tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from expertier.units import GIB, MIB


def print_table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """Print columns, the first to the left and the others to the right."""
    rows = [list(head), *map(list, lines)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    for row in rows:
        print(
            "  ".join(
                [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]
            )
        )


def print_rows(model: dict[str, Any], rows: dict[str, dict[str, Any]], link_gbs: float | None) -> None:
    """Print one model's rows, with ratios to all in VRAM and to llama.cpp's own cache at equal bytes.

    Where no row has that cache, to stock with the experts on the CPU instead. With the link's speed, also to a bound:
    a step's time with all in VRAM and then its missed bytes over the link.
    """
    sizes = sorted({int(size) for row in rows.values() for size in row.get("prefill", {})})
    print(f"\n{model['name']}: {model['expert_bytes'] / GIB:.2f} GiB of experts, {model['n_steps']} steps")
    rival = "cache" if any(row.get("side") == "cache" for row in rows.values()) else "ncmoe"
    head = ["row", "MiB", "t/s", "median ms", "/vram", f"/{rival}", "/bound", "hits %", "MB/step", "L2 %"]
    for size in sizes:
        head += [f"pp{size}", "/vram", f"/{rival}"]
    lines = []
    for name, row in rows.items():
        instead = f"cache-{row.get('percent')}" if rival == "cache" else rival
        beaten = rows.get(instead, {}) if row.get("side") == "ours" else {}
        lines.append(_line(name, row, rows.get("vram", {}), beaten, sizes, link_gbs))
    print_table(head, lines)
    print_predictions(rows)
    for name, row in rows.items():
        if "failed" in row:
            print(f"{name} FAILED: {row['failed']}")
        if row.get("replays") is False:
            print(
                f"{name}: the output is WRONG: after the last step, another token than the model's was likeliest"
            )


def print_predictions(rows: dict[str, dict[str, Any]]) -> None:
    """Print what rows foretold of the next layer's experts in their timed decode, and what came of it."""
    lines = []
    for name, row in rows.items():
        decode = row.get("decode", {})
        counts = {
            key.removeprefix("proxy."): value
            for key, value in decode.get("counts", {}).items()
            if key.startswith("proxy.")
        }
        if not counts.get("predicted"):
            continue
        begun, steps = counts.get("prefetches", 0), decode["steps"]
        lines.append(
            [
                name,
                _percent(counts, "predicted_right", "predicted"),
                _percent(counts, "missing_predicted", "missing"),
                f"{begun / steps:.2f}",
                _percent(counts, "prefetches_useful", "prefetches"),
                _percent(counts, "prefetches_in_time", "prefetches"),
                f"{counts.get('prefetch_bytes', 0) / steps / 1e6:.1f}",
                f"{counts.get('prefetch_wasted_bytes', 0) / steps / 1e6:.1f}",
                f"{counts.get('device_lookup_waits', 0) / steps:.2f}",
                str(counts.get("prefetch_pauses", 0)),
            ]
        )
    if lines:
        print()
        print_table(
            [
                "predictions", "recall %", "of missing %", "begun/step", "used %", "in time %", "MB/step", "wasted",
                "waits/step", "pauses",
            ],
            lines,
        )  # fmt: skip


def _percent(counts: dict[str, int], part: str, whole: str) -> str:
    total = counts.get(whole, 0)
    return f"{100 * counts.get(part, 0) / total:.1f}" if total else "-"


def _line(
    name: str,
    row: dict[str, Any],
    vram: dict[str, Any],
    instead: dict[str, Any],
    sizes: Sequence[int],
    link_gbs: float | None,
) -> list[str]:
    decode = row.get("decode", {})
    hits, mb = _traffic(row)
    line = [
        name,
        f"{row['cache_bytes'] / MIB:.0f}" if row.get("cache_bytes") else "-",
        _number(decode.get("tokens_per_s"), ".1f"),
        _number(decode.get("median_ms"), ".3f"),
        _ratio(decode, vram.get("decode")),
        _ratio(decode, instead.get("decode")),
        _ratio(decode, _bound(vram.get("decode"), mb, link_gbs)),
        _number(hits, ".1f"),
        _number(mb, ".1f"),
        _number(_l2_share(decode), ".1f"),
    ]
    for size in map(str, sizes):
        mine = row.get("prefill", {}).get(size)
        line += [
            _number(mine and mine["tokens_per_s"], ",.0f"),
            _ratio(mine, vram.get("prefill", {}).get(size)),
            _ratio(mine, instead.get("prefill", {}).get(size)),
        ]
    return line


def _traffic(row: dict[str, Any]) -> tuple[float | None, float | None]:
    """Hits in percent and MB a step of the timed decode; of llama.cpp's cache over all its decoding."""
    decode = row.get("decode", {})
    counts = decode.get("counts", {})
    if row.get("side") == "ours" and decode:
        hits, misses = counts.get("l1.hits", 0), counts.get("l1.misses", 0)
        share = 100 * hits / (hits + misses) if hits + misses else None
        return share, counts.get("l1.bytes_in", 0) / decode["steps"] / 1e6
    small = row.get("engine_cache", {}).get("ubatch <= 8")
    if small:
        steps = row.get("decoded", 0)
        share = 100 * small["hits"] / (small["hits"] + small["misses"])
        return share, small["uploaded_mib"] * MIB / steps / 1e6 if steps else None
    return None, None


def _bound(vram: dict[str, Any] | None, mb: float | None, link_gbs: float | None) -> dict[str, Any] | None:
    if not vram or mb is None or not link_gbs:
        return None
    return {"tokens_per_s": 1 / (1 / vram["tokens_per_s"] + mb / (link_gbs * 1e3))}


def _l2_share(decode: dict[str, Any]) -> float | None:
    counts = decode.get("counts", {})
    total = counts.get("l2.hits", 0) + counts.get("l2.misses", 0)
    return 100 * counts.get("l2.hits", 0) / total if total else None


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _ratio(mine: dict[str, Any] | None, base: dict[str, Any] | None) -> str:
    if not mine or not base or mine is base:
        return "-"
    return f"{mine['tokens_per_s'] / base['tokens_per_s']:.2f}"


def _parts_of_a_move(compute: dict[str, int], n_moves: int) -> list[str]:
    """Return milliseconds of a move, before it and of its parts, and the device's calls that it takes."""
    took = {part: compute[f"{part}_ns"] / n_moves / 1e6 for part in ("move", "drain", "queue", "wait")}
    decided = took["move"] - took["queue"] - took["wait"]
    parts = (took["move"], took["drain"], decided, took["queue"], took["wait"])
    return [*(f"{part:.2f}" for part in parts), f"{compute['copies'] / n_moves:.0f}"]


def print_moves(name: str, findings: dict[str, Any]) -> None:
    """Print what the boundary's moves cost, beside a boundary that stays and compute buffers outside of the slab.

    Of a move: waiting for what the engine had queued, before it; then deciding, in part while the device moves already;
    queueing the device's calls; and waiting for them.
    """
    if "failed" in findings:
        print(f"{name}, moves FAILED: {findings['failed']}")
    print(f"\n{name}: a prefill and then single tokens, in turn; medians")
    head = [
        "compute buffers",
        "prefill ms",
        "1st token ms",
        "2nd",
        "later",
        "MiB for slots",
        "moves up",
        "down",
        "ms each",
        "drain",
        "decide",
        "queue",
        "wait",
        "calls",
    ]
    lines = []
    for way, row in findings.get("ways", {}).items():
        compute = row["compute"] or {}
        n_moves = compute.get("moves_up", 0) + compute.get("moves_down", 0)
        lines.append(
            [
                way,
                f"{row['prefill_ms']:.1f}",
                f"{row['first_ms']:.2f}",
                f"{row['second_ms']:.2f}",
                f"{row['later_ms']:.2f}",
                f"{row['slots_bytes'] / MIB:.0f}",
                str(compute.get("moves_up", "-")),
                str(compute.get("moves_down", "-")),
                *(_parts_of_a_move(compute, n_moves) if n_moves else ["-"] * 6),
            ]
        )
    if lines:
        print_table(head, lines)
    for way, row in findings.get("ways", {}).items():
        if row.get("copy_ms"):
            times = row["moves_ms"] / row["copy_ms"]
            print(
                f"{way}: {row['moved_bytes'] / MIB:.0f} MiB moved in {row['moves_ms']:.2f} ms; one copy of as many "
                f"on the device takes {row['copy_ms']:.2f} ms: {times:.1f} times"
            )


def print_parity(label: str, cases: dict[str, dict[str, Any]]) -> None:
    """Print one model's comparisons with stock: a line for each number of slots, and each segment that differs."""
    print(f"\n{label}: logits of ours against stock with everything on the device")
    lines = []
    for slots, findings in cases.items():
        if "failed" in findings:
            print(f"{slots} slots FAILED: {findings['failed']}")
            continue
        segments = findings["segments"]
        differing = {name: found for name, found in segments.items() if not found["identical"]}
        tokens = sum(found["rows"] for found in segments.values())
        same = len(segments) - len(differing)
        lines.append(
            [f"{slots} slots", f"{same} of {len(segments)} segments bit-identical", f"{tokens}", *[""] * 3]
        )
        for name, found in differing.items():
            lines.append(
                [
                    f"  {name}",
                    f"{found['differing_rows']} tokens differ, the first is {found['first_row']}",
                    f"{found['rows']}",
                    f"{found['max_difference']:.3g}",
                    f"{found['mean_magnitude']:.3g}",
                    f"{100 * found['argmax_agrees']:.1f}",
                ]
            )
        if first := findings.get("first_difference"):
            print(f"{slots} slots, node by node: {_first(first)}")
    if lines:
        print_table(["", "", "tokens", "max difference", "mean |logit|", "argmax agrees %"], lines)


def _first(found: dict[str, Any]) -> str:
    """Say which tensor differs first."""
    if "failed" in found:
        return f"FAILED: {found['failed']}"
    if "unlike" in found:
        return f"after {found['equal_before']} equal tensors the graphs differ: {' against '.join(found['unlike'])}"
    if found["tensor"] is None:
        return f"all {found['equal_before']} tensors are equal"
    return (
        f"{found['tensor']} {found['ne']} of graph {found['graph']} differs first, after {found['equal_before']} equal "
        f"tensors: {found['differing_values']} of {found['values']} values, by {found['max_difference']:.3g} at most, "
        f"mean magnitude {found['mean_magnitude']:.3g}"
    )
