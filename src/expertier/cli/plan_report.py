"""The output of `expertier plan`: one document, or the same as text for a person."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from expertier.cli.report import escape, spread
from expertier.planning import Planned
from expertier.planning_devices import Inputs
from expertier.units import mib

_MEANINGS = {
    "slots": "nothing: every expert has a slot",
    "reserve": "the device's memory",
    "cap": "MOE_POOL_CAP_MIB",
    "pool": "the size that was asked for, or the share of the experts that `auto` takes",
    "ram": "the RAM, half of which is left to the engine and the page cache",
}


def describe(inputs: Inputs, planned: Planned, rates_source: str) -> dict[str, Any]:
    """Return the plan as one document."""
    table, narrow = inputs.table, planned.narrow
    held = sum(n * layer.expert_bytes for n, layer in zip(narrow.slots, table.layers, strict=True))
    return {
        "model": str(table.path),
        "architecture": table.architecture,
        "layers": table.n_layers,
        "experts": [layer.n_experts for layer in table.layers],
        "top_k": table.top_k,
        "experts_used": [layer.top_k for layer in table.layers],
        "expert_bytes": table.expert_bytes_total,
        "context": {
            "n_ctx": inputs.shape.n_ctx,
            "n_ubatch": inputs.shape.n_ubatch,
            "sequences": inputs.shape.n_seqs,
        },
        "devices": [ledger.as_dict() for ledger in planned.devices],
        "ram": planned.ram.as_dict(),
        "slots": list(narrow.slots),
        "slots_wide": list(planned.wide.slots),
        "arena_bytes": narrow.used_bytes,
        "share_of_experts": held / table.expert_bytes_total,
        "limited_by": [str(ledger.limited_by) for ledger in planned.devices] or [str(planned.ram.limited_by)],
        "below_top_k": [
            layer
            for layer, (n, d) in enumerate(zip(narrow.slots, inputs.demands, strict=True))
            if n < d.top_k
        ],
        "savings": planned.savings,
        "page_cache_share": planned.cached_share,
        **planned.prediction.as_dict(),
        "hit_rate_source": inputs.hits.source,
        "rates": inputs.rates.as_dict(),
        "rates_source": rates_source,
        "notes": list(planned.notes),
    }


def print_plan(document: dict[str, Any], console: Console) -> None:
    """Print what `describe` returned."""
    context = document["context"]
    console.print(
        f"[bold]{escape(Path(document['model']).name)}[/]: {document['architecture']}, "
        f"{document['layers']} layers with experts, "
        f"top-{spread(document['experts_used'])}, {mib(document['expert_bytes'])} of experts; "
        f"{context['n_ctx']} tokens of context in "
        f"batches of {context['n_ubatch']}",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    for number, ledger in enumerate(document["devices"]):
        name = f"device {number}" if len(document["devices"]) > 1 else "device"
        _print_ledger(name, ledger, console)
        console.print(
            f"  limited by {ledger['limited_by']}: {_MEANINGS[ledger['limited_by']]}; slots have "
            f"{mib(ledger['arena_narrow_bytes'])} while batches are narrow",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
    _print_ledger("RAM", document["ram"], console)
    _print_slots(document, console)
    _print_speed(document, console)
    for note in document["notes"]:
        console.print(f"note: {escape(note)}", highlight=False, soft_wrap=True)
    if document.get("plot"):
        console.print(f"drawn in {escape(document['plot'])}", highlight=False, soft_wrap=True)


def _print_ledger(name: str, ledger: dict[str, Any], console: Console) -> None:
    grid = Table(box=None, header_style="bold", show_edge=False)
    grid.add_column(name, min_width=16)
    grid.add_column("MiB", justify="right", min_width=10)
    grid.add_column("share", justify="right")
    total = ledger["total_bytes"]
    for consumer, n_bytes in ledger["entries"].items():
        if n_bytes:
            taken = " (allocated)" if consumer in ledger.get("taken", {}) else ""
            grid.add_row(consumer + taken, f"{n_bytes / (1 << 20):,.0f}", f"{100 * n_bytes / total:.0f} %")
    if ledger["unused_bytes"]:
        n_bytes = ledger["unused_bytes"]
        grid.add_row("unused", f"{n_bytes / (1 << 20):,.0f}", f"{100 * n_bytes / total:.0f} %")
    grid.add_row("[bold]all[/]", f"[bold]{total / (1 << 20):,.0f}[/]", "")
    console.print(grid)


def _print_slots(document: dict[str, Any], console: Console) -> None:
    console.print(
        f"[bold]slots[/] for {100 * document['share_of_experts']:.1f} % of the experts: "
        f"{_slots(document['slots'], document['experts'])}",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    if document["slots_wide"] != document["slots"]:
        console.print(
            f"  while a wide batch runs: {_slots(document['slots_wide'], document['experts'])}",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
    if document["below_top_k"]:
        console.print(
            f"  [yellow]{len(document['below_top_k'])} layers have fewer slots than a token uses experts: tokens run "
            "in several passes[/]",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
    savings = document["savings"]
    console.print(
        f"  a token misses {mib(int(savings['missed_bytes_per_token']))}; one more slot a layer would save "
        f"{mib(int(savings['saved_by_one_more_slot_a_layer']))} of them, one more GiB "
        f"{mib(int(savings['saved_by_one_more_gib']))}",
        highlight=False, soft_wrap=True,
    )  # fmt: skip


def _print_speed(document: dict[str, Any], console: Console) -> None:
    console.print(
        f"[bold]hit rate[/] {100 * document['hit_rate']:.1f} %, from {escape(document['hit_rate_source'])}",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    for name in ("decode", "prefill"):
        speed = document[f"{name}_tokens_per_s"]
        low, high = _number(speed["low"]), _number(speed["high"])
        console.print(
            f"[bold]{name}[/] {_number(speed['predicted'])} tokens/s ({low} to {high})",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
    parts = document["seconds_per_token"]
    spent = ", ".join(
        f"{name.replace('_', ' ')} {1e3 * value:.2f} ms" for name, value in parts.items() if value > 0
    )
    console.print(f"  a token: {spent}", highlight=False, soft_wrap=True)
    console.print(f"  rates {escape(document['rates_source'])}", highlight=False, soft_wrap=True)


def _slots(slots: Sequence[int], experts: Sequence[int]) -> str:
    """Return runs of equal numbers, such as `0-11: 40 of 128`."""
    return ", ".join(
        f"{n} of {of} in layer{'s' if last > first else ''} {first}{f' to {last}' if last > first else ''}"
        for first, last, n, of in _runs(slots, experts)
    )


def _runs(slots: Sequence[int], experts: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    first = 0
    for layer in range(1, len(slots) + 1):
        if layer == len(slots) or (slots[layer], experts[layer]) != (slots[first], experts[first]):
            yield first, layer - 1, slots[first], experts[first]
            first = layer


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
