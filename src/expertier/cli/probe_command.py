"""`expertier probe`: how fast this machine's paths are, measured once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from expertier.cli import report
from expertier.cli.early_checks import check_threads
from expertier.engine_adapter.llama_cpp import LoadedEngine
from expertier.engine_adapter.open import open_engine
from expertier.engine_adapter.placement.device_traits import engine_name
from expertier.engine_adapter.placement.engine_device import device_names
from expertier.errors import EngineError
from expertier.hip import open_device
from expertier.hip.device import Device
from expertier.planner.predict.rates import MachineRates
from expertier.probe.probe import machine_key, probe_file, run_probe, saved_probe

GB = 1e9
_NAMES = {
    "decode": "weights, one token",
    "prefill": "weights, a prompt (x tokens)",
    "pool": "a missed expert from L2",
    "page_cache": "from the page cache",
    "disk": "from the disk",
}


def probe(
    model: Annotated[
        Path | None,
        typer.Argument(
            metavar="[MODEL]",
            help="Read this file to measure the disk, instead of a file in the cache folder.",
        ),
    ] = None,
    device: Annotated[str, typer.Option(metavar="NAME", help="host, auto, hip:N or cuda:N.")] = "host",
    threads: Annotated[int, typer.Option("--threads", "-t", min=0, help="0: one a processor.")] = 0,
    engine: Annotated[bool, typer.Option(help="Run small models on the engine too.")] = True,
    llama_cpp: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="A llama.cpp that you built: its engine, not the wheel's."),
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Measure even where a saved result exists.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Measure this machine's paths once: page cache, disk, slots, link, engine; takes seconds; the result is saved."""
    console = Console(stderr=True)
    check_threads(threads)
    with open_device(device) as opened:
        key = machine_key(opened.name, threads)
        found = None if again else saved_probe(key)
        was_saved = found is not None
        if found is None:
            with report.progress(console) as say:
                loaded, engine_device = _engine(llama_cpp, opened, say) if engine else (None, "CPU")
                found = run_probe(
                    key, opened, loaded, say, model=model, n_threads=threads, engine_device=engine_device
                )
    document = {**found.as_dict(), "saved_to": str(probe_file(key)), "measured_now": not was_saved}
    if as_json:
        print(json.dumps(document))
    else:
        _print(document, found.rates, Console())


def _engine(llama_cpp: Path | None, device: Device, say: Any) -> tuple[LoadedEngine | None, str]:
    """Return the engine and its own name of the device; None for an engine that lacks the device."""
    name = engine_name(device.name)
    try:
        engine = open_engine(llama_cpp, say)
    except EngineError as error:
        say(f"without the engine: {error}")
        return None, name
    if name not in device_names(engine.proxy):
        say(f"without the engine, which has no {name}: give --llama-cpp, a build of it with this device")
        return None, name
    return engine, name


def _print(document: dict[str, Any], rates: MachineRates, console: Console) -> None:
    grid = Table(box=None, header_style="bold", title=document["machine"]["processor"], title_justify="left")
    for heading in ("path", "GB/s", "us each", "+-", ""):
        grid.add_column(heading, justify="left" if heading in ("path", "") else "right")
    for name, label in _NAMES.items():
        rate = getattr(rates, name)
        grid.add_row(
            label,
            f"{rate.bytes_per_s / GB:.2f}",
            f"{1e6 * rate.each_s:.0f}",
            f"{100 * rate.spread:.0f} %",
            "" if rate.measured else "not measured",
        )
    files, moved = document["files"], document["device"]
    raw = {"page cache": files["page_cache"], "disk, cold": files["disk_cold"], "disk, direct": files["disk_direct"],
           "between slots": moved["between_slots"], "link, pinned": moved["link"]}  # fmt: skip
    for name, value in raw.items():
        grid.add_row(name, "-" if value is None else f"{value / GB:.2f}", "", "", "raw")
    if moved["read_back_s"] is not None:
        grid.add_row("ids back", "", f"{1e6 * moved['read_back_s']:.0f}", "", "raw")
    console.print(grid)
    when = f"measured in {document['seconds']:.0f} s" if document["measured_now"] else "measured before"
    console.print(f"{when}; saved to {report.escape(document['saved_to'])}", highlight=False, soft_wrap=True)
