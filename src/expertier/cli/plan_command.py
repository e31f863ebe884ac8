"""`expertier plan`: where the memory goes, the slots of each layer, and the speed to expect."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from rich.console import Console

from expertier.cli import plan_report
from expertier.cli.plan_sizes import parse_size
from expertier.engine_adapter.placement.device_traits import engine_name, traits_of
from expertier.errors import ConfigError
from expertier.hip import open_device
from expertier.planner.budget.context_memory import ContextShape
from expertier.planner.predict.hit_rates import FromExperience, FromProfile, FromTrace, HitRates
from expertier.planner.predict.rates import MachineRates, PathRate
from expertier.planning import curve, make_plan
from expertier.planning_devices import Inputs, Machine
from expertier.probe.probe import machine_key, saved_probe
from expertier.tiers.config.config import TierConfig
from expertier.tiers.config.split_mode import SplitMode
from expertier.tiers.model.geometry import read_geometry
from expertier.tiers.model.table import ExpertTable
from expertier.tiers.shared.host_memory import available_bytes

GB = 1e9
_KV_TYPES = {"f16": (2, 1), "q8_0": (34, 32), "q4_0": (18, 32), "f32": (4, 1)}
_CARD = {"vram_gbs": 450.0, "link_gbs": 20.0, "disk_gbs": 3.0}

_CARD_LAYER_S = 9e-5  # a layer through the proxy on an H200 took 80 to 110 us, weights included
# How many times a wide batch uses a byte of weights in the time that decode reads it once; this is a guess.
_CARD_PREFILL = 6


def plan(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A GGUF file.", show_default=False)],
    vram: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="All memory of a card, such as 16GiB. Without a card the host computes."
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Instead of --vram: the free memory of this device: auto, hip:N or cuda:N."
        ),
    ] = None,
    devices: Annotated[int, typer.Option(min=1, help="How many such cards share the layers.")] = 1,
    ram: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="All RAM that may be used; by default the RAM that is available now."
        ),
    ] = None,
    ctx: Annotated[int, typer.Option("--ctx", "-c", min=1, help="Context length in tokens.")] = 4096,
    ubatch: Annotated[int, typer.Option(min=1, help="Tokens of a prompt that run at once.")] = 512,
    parallel: Annotated[int, typer.Option(min=1, help="Sequences that share the context.")] = 1,
    kv_type: Annotated[str, typer.Option(metavar="TYPE", help=", ".join(_KV_TYPES) + ".")] = "f16",
    full_windows: Annotated[
        bool,
        typer.Option(help="Sliding blocks keep the full context, as in `run` but not in llama-server."),
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Recorded routing of this model, replayed for the hit rate."),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A routing profile, for the slots and for the hit rate."),
    ] = None,
    expert_cache_mib: Annotated[str | None, typer.Option(metavar="MIB|auto", help="L1 arena.")] = None,
    host_pool_mib: Annotated[str | None, typer.Option(metavar="MIB|auto", help="L2 pool.")] = None,
    headroom_mib: Annotated[
        str | None, typer.Option(metavar="MIB", help="Memory to leave to the driver (MOE_SLAB_HEADROOM_MIB).")
    ] = None,
    rail_mib: Annotated[
        str | None, typer.Option(metavar="MIB", help="Memory to leave free (MOE_POOL_RAIL_MIB).")
    ] = None,
    cap_mib: Annotated[
        str | None, typer.Option(metavar="MIB", help="Most for L1 (MOE_POOL_CAP_MIB).")
    ] = None,
    vram_gbs: Annotated[float, typer.Option(min=0.1, help="GB/s of a card's memory, assumed.")] = _CARD[
        "vram_gbs"
    ],
    link_gbs: Annotated[float, typer.Option(min=0.1, help="GB/s from RAM to a card, assumed.")] = _CARD[
        "link_gbs"
    ],
    disk_gbs: Annotated[float, typer.Option(min=0.01, help="GB/s of the disk, assumed.")] = _CARD["disk_gbs"],
    threads: Annotated[
        int, typer.Option("--threads", "-t", min=0, help="As in the probe; 0: one a processor.")
    ] = 0,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png|html", help="Draw hit rate and speed over the memory.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Say where the memory goes, how many slots each layer gets, what binds, and how fast it should be."""
    if kv_type not in _KV_TYPES:
        raise ConfigError(f"--kv-type is {kv_type!r}: give one of {', '.join(_KV_TYPES)}")
    if plot is not None:
        from expertier.cli.plan_plot import check_plot

        check_plot(plot)
    config = TierConfig.from_env(
        {
            "MOE_EXPERT_CACHE_MIB": expert_cache_mib,
            "MOE_HOST_POOL_MIB": host_pool_mib,
            "MOE_SLAB_HEADROOM_MIB": headroom_mib,
            "MOE_POOL_RAIL_MIB": rail_mib,
            "MOE_POOL_CAP_MIB": cap_mib,
        }
    )
    if vram is not None and device is not None:
        raise ConfigError("give either --vram, the memory of a card, or --device, a card of this machine")
    if vram is None and devices > 1:
        raise ConfigError(f"--devices {devices} needs --vram, the memory of each of them")
    if devices > 1 and config.split_mode is SplitMode.TENSOR:
        raise ConfigError(
            f"MOE_SPLIT_MODE=tensor was asked for with --devices {devices}: plans are for cards that share the layers, "
            "as only llama.cpp knows how it cuts tensors; set it to `layer`, or start `run --split-mode tensor`, which "
            "says what it has"
        )
    table = ExpertTable.from_gguf(model)
    demands = table.layer_demands()
    profile = profile if profile is not None else config.profile
    hits, optimum, uses = _routing(table, trace, profile, str(config.policy))
    cards, probed, in_slab = ((), None, True) if device is None else _card_here(device, threads)
    if vram is not None:
        cards = (parse_size("--vram", vram),) * devices
    ram_bytes = parse_size("--ram", ram) if ram is not None else available_bytes()
    machine = Machine(ram_bytes, cards, computes_in_slab=in_slab)
    rates, source = _rates(machine, threads, vram_gbs, link_gbs, disk_gbs)
    if probed is not None:
        rates, source = (
            probed,
            f"measured on {device} by `expertier probe --device`",
        )
    inputs = Inputs(
        table, read_geometry(model), ContextShape(
            ctx, min(ubatch, ctx), parallel, _KV_TYPES[kv_type], full_windows=full_windows
        ), machine, config, rates, hits, uses, demands,
    )  # fmt: skip
    planned = make_plan(inputs)
    document = plan_report.describe(inputs, planned, source)
    if plot is not None:
        from expertier.cli.plan_plot import write_plot

        document["curve"] = curve(inputs, planned, optimum)
        write_plot(plot, document)
        document["plot"] = str(plot)
    if as_json:
        print(json.dumps(document))
    else:
        plan_report.print_plan(document, Console())


def _card_here(name: str, threads: int) -> tuple[tuple[int, ...], MachineRates | None, bool]:
    """Return the free bytes of a device of this machine (none for the host) and what a probe measured there.

    The last value says whether an engine computes in the slab there under `MOE_SLAB_COMPUTE=auto`.
    """
    with open_device(name) as device:
        found = saved_probe(machine_key(device.name, threads))
        if not device.has_own_memory:
            return (), None, False
        in_slab = traits_of(engine_name(device.name)).computes_in_slab
        return (device.free_bytes(),), None if found is None else found.rates, in_slab


def _routing(
    table: ExpertTable, trace: Path | None, profile: Path | None, policy: str
) -> tuple[HitRates, HitRates | None, Any]:
    """Return the source of the hit rates, the optimum of a recording, and the uses by which slots are planned."""
    demands = table.layer_demands()
    blocks, n_experts = [layer.block for layer in table.layers], [layer.n_experts for layer in table.layers]
    hits: HitRates = FromExperience(demands)
    optimum: HitRates | None = None
    uses = None
    if profile is not None:
        from expertier.planner.profiles.file import read_profile

        read = read_profile(profile)
        uses = read.plan_uses(blocks, n_experts)
        if read.experts is not None:
            hits = FromProfile(demands, read.experts)
    if trace is not None:
        from expertier.planner.replay.run import BELADY
        from expertier.planner.traces.file import read_trace

        recorded = read_trace(trace)
        hits, optimum = FromTrace(demands, recorded, policy), FromTrace(demands, recorded, BELADY)
    return hits, optimum, uses


def _rates(
    machine: Machine, threads: int, vram_gbs: float, link_gbs: float, disk_gbs: float
) -> tuple[MachineRates, str]:
    """Return the rates to predict with, and where these rates come from."""
    host = saved_probe(machine_key("host", threads))
    if machine.vram_bytes:
        rates = _card(vram_gbs, link_gbs, disk_gbs)
        if host is not None and host.details["files"]["page_cache"]:
            cached = host.details["files"]["page_cache"]
            rates = replace(rates, page_cache=PathRate(1 / (1 / cached + 1 / (link_gbs * GB)), 5e-5))
        return rates, (
            f"assumed for the card: {vram_gbs:g} GB/s of memory, {link_gbs:g} over the link, {disk_gbs:g} from the "
            "disk (--vram-gbs, --link-gbs, --disk-gbs)"
        )
    if host is not None:
        return host.rates, "measured on this machine by `expertier probe`"
    cores = _cores()
    weights = PathRate(min(3e9 * cores, 4e10), 5e-5)
    return MachineRates(
        weights,
        PathRate(weights.bytes_per_s * 4),
        PathRate(5e9, 1e-4),
        PathRate(3e9, 2e-4),
        PathRate(disk_gbs * GB, 2e-4),
    ), "assumed: run `expertier probe` once to measure this machine"


def _cores() -> int:
    try:
        return psutil.cpu_count(logical=False) or 1
    except OSError:  # there is no /proc
        return os.cpu_count() or 1


def _card(vram_gbs: float, link_gbs: float, disk_gbs: float) -> MachineRates:
    link, disk = link_gbs * GB, disk_gbs * GB
    return MachineRates(
        decode=PathRate(0.6 * vram_gbs * GB, _CARD_LAYER_S),
        prefill=PathRate(0.6 * vram_gbs * GB * _CARD_PREFILL),
        pool=PathRate(link, 1e-5),
        page_cache=PathRate(1 / (1 / 8e9 + 1 / link), 5e-5),
        disk=PathRate(1 / (1 / disk + 1 / link), 1e-4),
    )
