"""The command line's output for a person: tables, fields and progress."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from gguf import GGMLQuantizationType
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from expertier.planner.budget.allocate import plan_layers
from expertier.tiers.model.table import ExpertTable
from expertier.units import mib

__all__ = [
    "describe_table",
    "escape",
    "print_demo",
    "print_fields",
    "print_run",
    "print_table",
    "progress",
    "spread",
]


@contextmanager
def progress(console: Console) -> Iterator[Callable[[str], None]]:
    """Show the progress, one line a step, with a spinner for the running step where there is a terminal."""
    start = time.monotonic()
    with console.status("starting") as status:

        def say(message: str) -> None:
            status.update(escape(message))
            console.print(f"[dim]{time.monotonic() - start:6.1f} s[/]  {escape(message)}", highlight=False)

        yield say


def describe_table(table: ExpertTable, arena_bytes: int | None) -> dict[str, Any]:
    """Return what `inspect` says of a model; with `arena_bytes`, also what such an arena would hold."""
    demands = table.layer_demands()
    layers = [
        {
            "layer": demand.layer,
            "block": layer.block,
            "experts": layer.n_experts,
            "top_k": layer.top_k,
            "expert_bytes": sum(matrix.expert_bytes for matrix in layer.matrices),
            "layer_bytes": layer.n_experts * sum(matrix.expert_bytes for matrix in layer.matrices),
            "slot_bytes": demand.slot_bytes,
            "types": {matrix.role: GGMLQuantizationType(matrix.ggml_type).name for matrix in layer.matrices},
        }
        for demand, layer in zip(demands, table.layers, strict=True)
    ]
    document: dict[str, Any] = {
        "path": str(table.path),
        "architecture": table.architecture,
        "layers": len(layers),
        "top_k": table.top_k,
        "file_bytes": table.file_bytes,
        "expert_bytes": table.expert_bytes_total,
        "other_bytes": table.file_bytes - table.expert_bytes_total,
        "smallest_arena_bytes": sum(demand.fixed_bytes + demand.slot_bytes for demand in demands),
        "per_layer": layers,
    }
    if arena_bytes is not None:
        plan = plan_layers(demands, budget_bytes=arena_bytes)
        document["arena"] = {
            "budget_bytes": arena_bytes,
            "used_bytes": plan.used_bytes,
            "slots": list(plan.slots),
            "share_of_experts": sum(plan.slots) / sum(layer.n_experts for layer in table.layers),
        }
    return document


def print_table(document: dict[str, Any], console: Console) -> None:
    """Print what `describe_table` returned."""
    fields = {
        "architecture": document["architecture"],
        "MoE layers": document["layers"],
        "experts used a token": spread([layer["top_k"] for layer in document["per_layer"]]),
        "file": mib(document["file_bytes"]),
        "experts": mib(document["expert_bytes"]),
        "everything else": mib(document["other_bytes"]),
        "smallest arena": f"{mib(document['smallest_arena_bytes'])} (one slot a layer)",
    }
    if arena := document.get("arena"):
        slots = Counter(arena["slots"])
        fields["arena"] = (
            f"{mib(arena['budget_bytes'])} holds {100 * arena['share_of_experts']:.1f} % of the experts: "
            + ", ".join(
                f"{n} slots in {layers} layer{'s'[: layers > 1]}" for n, layers in sorted(slots.items())
            )
        )
    print_fields(document["path"], fields, console)
    grid = Table(box=None, header_style="bold")
    for heading in ("layers", "experts", "used", "bytes an expert", "a layer", "types"):
        grid.add_column(heading, justify="left" if heading in ("layers", "types") else "right")
    for blocks, layer in _runs_of_like_layers(document["per_layer"]):
        types = ", ".join(f"{role} {kind}" for role, kind in layer["types"].items())
        counts = (str(layer["experts"]), str(layer["top_k"]))
        grid.add_row(blocks, *counts, mib(layer["expert_bytes"]), mib(layer["layer_bytes"]), types)
    console.print(grid)


def print_run(document: dict[str, Any], console: Console) -> None:
    """Print what a generation through the tiers did."""
    console.print(
        f"{document['generated_tokens']} tokens at {document['decode_tokens_per_s']:.1f} tokens/s, prompt of "
        f"{document['prompt_tokens']} at {document['prefill_tokens_per_s']:.1f} tokens/s",
        highlight=False,
    )
    _print_tiers(document, console)
    for each in document.get("devices", []):
        l1 = each["l1"]
        console.print(
            f"{each['device']}: {each['layers']} layers, {l1['slots']} slots in {mib(l1['budget_bytes'])}, "
            f"{l1['hits']} hits and {l1['misses']} misses, {mib(l1['bytes_in'])} filled",
            highlight=False,
        )


def print_demo(document: dict[str, Any], console: Console) -> None:
    """Print the demo's comparison."""
    parity, model = document["parity"], document["model"]
    console.print(
        f"random model: {model['layers']} layers, {model['experts']} experts, top-{model['top_k']}, "
        f"{mib(model['file_bytes'])}, {mib(model['expert_bytes'])} of it experts",
        highlight=False,
    )
    grid = Table(box=None, header_style="bold")
    for heading in ("", "decode tokens/s", "prefill tokens/s"):
        grid.add_column(heading, justify="right" if heading else "left")
    labels = {
        "stock": "stock",
        "stock_norepack": "stock, repacking off",
        "tiers": "through the tiers",
    }
    for name, label in labels.items():
        grid.add_row(
            label, f"{document['tokens_per_s'][name]:.1f}", f"{document['prefill_tokens_per_s'][name]:.1f}"
        )
    console.print(grid)
    _print_tiers(document, console)
    verdict = "[green]bit-identical[/]" if parity["bit_identical"] else "[bold red]different[/]"
    console.print(
        f"logits of {parity['prefill_tokens']} prompt and {parity['decode_tokens']} decode tokens: {verdict}",
        highlight=False,
    )
    console.print(
        f"peak RSS {mib(document['rss_peak_bytes'])}, limit {mib(document['rss_limit_bytes'])}"
        f" (stock {mib(document['rss_stock_bytes'])})",
        highlight=False,
    )


def spread(numbers: Sequence[int]) -> str:
    """Return the number if all of `numbers` are equal, otherwise the smallest and the largest."""
    first, last = min(numbers), max(numbers)
    return str(first) if first == last else f"{first} to {last}"


def print_fields(title: str, fields: dict[str, Any], console: Console) -> None:
    """Print named values under a title."""
    console.print(f"[bold]{escape(title)}[/]", highlight=False)
    width = max(map(len, fields))
    for name, value in fields.items():
        shown = ", ".join(map(str, value)) if isinstance(value, list | tuple) else value
        shown = "none" if shown is None or shown == "" else str(shown)
        console.print(
            f"  {name.replace('_', ' '):<{width}}  {escape(shown)}", highlight=False, soft_wrap=True
        )


def _print_tiers(document: dict[str, Any], console: Console) -> None:
    l1, l2, file = document["l1"], document["l2"], document["file"]
    grid = Table(box=None, header_style="bold")
    for heading in ("tier", "budget", "used", "hits", "misses", "hit rate", "evictions", "bytes in"):
        grid.add_column(heading, justify="left" if heading == "tier" else "right")
    for name, tier, used in (("L1 arena", l1, l1["used_bytes"]), ("L2 pool", l2, l2["peak_bytes"])):
        lookups = tier["hits"] + tier["misses"]
        grid.add_row(
            name,
            mib(tier["budget_bytes"]),
            mib(used),
            str(tier["hits"]),
            str(tier["misses"]),
            f"{100 * tier['hits'] / lookups:.1f} %" if lookups else "-",
            str(tier["evictions"]),
            mib(tier["bytes_in"]),
        )
    console.print(grid)
    console.print(f"from the file: {mib(file['bytes_read'])} in {file['reads']} reads", highlight=False)
    load = document["load"]
    console.print(
        f"loading read {mib(load['bytes_read'])}, {mib(load['expert_bytes_read'])} of it experts; "
        f"{mib(load['expert_bytes_skipped'])} of experts were skipped",
        highlight=False,
    )


def _runs_of_like_layers(layers: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (block numbers, layer) for each run of layers that differ only in their number."""
    start = 0
    for end in range(1, len(layers) + 1):
        if end < len(layers) and _shape(layers[end]) == _shape(layers[start]):
            continue
        first, last = layers[start]["block"], layers[end - 1]["block"]
        yield (f"blk.{first}" if first == last else f"blk.{first} to {last}", layers[start])
        start = end


def _shape(layer: dict[str, Any]) -> tuple[Any, ...]:
    return (layer["experts"], layer["top_k"], layer["expert_bytes"], tuple(layer["types"].items()))
