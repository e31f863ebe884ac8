"""Whether two devices fill from host memory at once: each alone against both, side by side.

    python benchmarks/two_devices.py [--devices cuda:0 cuda:1] [--rounds N] [--gib N] [--expert-mib N]
        [--ways NAME ...] [--json]

    copies   pinned host memory to the device, an expert's size at a time, by the driver: no tiers
    fills    TierManager.acquire of 8 experts that L1 lacks and L2 has, through a `TierSet` of one manager a device;
             each call waits until the bytes are there
    queued   the same with a stream, as an engine queues its work: no call waits before the end
    small    fills of experts of 3 KiB, whose copies cost next to nothing: what the calls cost by themselves

In a round the first device runs alone, then the second, then both on a thread each; rounds take turns. A ratio is the
bytes a second of both over the sum of what each had alone: 1 means two independent links, 0.5 one link that both share.
Beside the speed of fills stands its share of the speed of copies in this run, and how long an expert takes; for small
experts that time is nearly all Python. `--devices host host` tries it without GPUs.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import logging
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from at_once import run_at_once

import expertier as et
from expertier.hip.device import Device
from expertier.testing.pattern_source import PatternSource
from expertier.testing.synthetic_table import LayerShape, synthetic_table
from expertier.tiers.config.budget import all_copies_bytes
from expertier.tiers.layer_division import DeviceShare, LayerDivision
from expertier.tiers.tier_set import TierSet
from expertier.units import GIB, MIB

AT_ONCE = 8
N_FF = 1024
BYTES_A_ROW = 3 * N_FF // 32 * 34  # Q8_0, of gate, up and down
WAYS = ("copies", "fills", "queued", "small")
SMALL = LayerShape(512, 32, 32, ("Q8_0",) * 3)


def compare(jobs: Sequence[Callable[[], None]], n_bytes: int, rounds: int) -> dict[str, Any]:
    """Run each job alone and all together, in turns; `n_bytes` is what each of them moves."""
    alone: list[list[float]] = [[] for _ in jobs]
    both, ratios = [], []
    run_at_once(jobs)  # warm
    for _ in range(rounds):
        speeds = [n_bytes / run_at_once([job]) / 1e9 for job in jobs]
        together = len(jobs) * n_bytes / run_at_once(jobs) / 1e9
        for found, speed in zip(alone, speeds, strict=True):
            found.append(speed)
        both.append(together)
        ratios.append(together / sum(speeds))
    return {
        "alone_gb_s": [statistics.median(found) for found in alone],
        "both_gb_s": statistics.median(both),
        "ratio": {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)},
    }


def copies(devices: Sequence[Device], expert_bytes: int, total: int, rounds: int) -> dict[str, Any]:
    """Copy pinned memory in pieces of an expert's size."""
    with ExitStack() as undo:
        jobs = []
        for device in devices:
            source, target = device.alloc_pinned(total), device.alloc(total)
            undo.callback(device.free, source)
            undo.callback(device.free, target)
            ctypes.memset(source, 1, total)
            stream = device.create_stream() if device.has_streams else 0
            if stream:
                undo.callback(device.destroy_stream, stream)

            def job(
                device: Device = device, source: int = source, target: int = target, stream: int = stream
            ) -> None:
                for offset in range(0, total - expert_bytes + 1, expert_bytes):
                    device.copy_in(target + offset, source + offset, expert_bytes, stream)
                device.synchronize()

            jobs.append(job)
        return compare(jobs, total // expert_bytes * expert_bytes, rounds)


def fills(
    devices: Sequence[Device], shape: LayerShape, rounds: int, *, queued: bool = False
) -> dict[str, Any]:
    """Bring experts from L2 into the slots of two layers a device, of which every batch lacks all."""
    table = synthetic_table([shape] * (2 * len(devices)), top_k=AT_ONCE)
    demands = table.layer_demands()
    config = et.TierConfig(
        expert_cache_bytes=sum(demand.bytes_for(2 * AT_ONCE) for demand in demands),
        host_pool_bytes=all_copies_bytes(table),
        fill_pool=False,  # no reads but those that are measured
    )
    shares = [DeviceShare(device, (2 * i, 2 * i + 1)) for i, device in enumerate(devices)]
    with ExitStack() as undo:
        tiers = undo.enter_context(
            TierSet(LayerDivision(table, shares), config=config, source=PatternSource())
        )
        batches = [
            (layer, list(range(begin, begin + AT_ONCE)))
            for begin in range(0, shape.n_experts - AT_ONCE + 1, AT_ONCE)
            for layer in range(2)
        ]

        def job(manager: et.TierManager, device: Device, stream: int | None) -> None:
            for layer, experts in batches:
                manager.acquire(layer, experts, stream).release()
            device.synchronize()

        jobs = []
        for manager, device in zip(tiers.managers, devices, strict=True):
            stream = device.create_stream() if queued else None
            if stream is not None:
                undo.callback(device.destroy_stream, stream)
            job(manager, device, stream)  # fills L2
            jobs.append(partial(job, manager, device, stream))
        before = tiers.stats()
        expert_bytes = table.layers[0].expert_bytes
        found = compare(jobs, len(batches) * AT_ONCE * expert_bytes, rounds)
        after = tiers.stats()
        found["expert_bytes"] = expert_bytes
        found["alone_us"] = [expert_bytes / speed / 1e3 for speed in found["alone_gb_s"]]
        found["both_us"] = expert_bytes / found["both_gb_s"] / 1e3
        found["l1_hits"] = after.l1.hits - before.l1.hits
        found["file_reads"] = after.file.reads - before.file.reads
        return found


def measure(
    devices: Sequence[Device], ways: Sequence[str], expert_bytes: int, total: int, rounds: int
) -> dict[str, dict[str, Any]]:
    """Measure the ways that are asked for; what is queued only where devices have streams."""
    n_experts = max(total // expert_bytes // 2, 4 * AT_ONCE)
    rows = max(expert_bytes // BYTES_A_ROW, 32) // 32 * 32
    shape = LayerShape(n_experts, rows, N_FF, ("Q8_0",) * 3)
    run: dict[str, Callable[[], dict[str, Any]]] = {
        "copies": lambda: copies(devices, expert_bytes, total, rounds),
        "fills": lambda: fills(devices, shape, rounds),
        "queued": lambda: fills(devices, shape, rounds, queued=True),
        "small": lambda: fills(devices, SMALL, rounds),
    }
    if not all(device.has_streams for device in devices):
        ways = [way for way in ways if way != "queued"]
    return {way: run[way]() for way in ways}


def text_of(name: str, found: dict[str, Any], copied: dict[str, Any] | None, devices: Sequence[str]) -> str:
    """Return a way's line; `copied` are the copies of the same run, if there were any."""
    ratio = found["ratio"]
    said = f"together over the sum of alone {ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})"
    if name != "small":
        speeds = zip(devices, found["alone_gb_s"], strict=True)
        alone = ", ".join(f"{device} {speed:.1f}" for device, speed in speeds)
        said = f"{alone} GB/s alone, {found['both_gb_s']:.1f} GB/s together; {said}"
    if name in ("fills", "queued") and copied is not None:
        shares = [a / b for a, b in zip(found["alone_gb_s"], copied["alone_gb_s"], strict=True)]
        shares.append(found["both_gb_s"] / copied["both_gb_s"])
        said += "; of the copies " + ", ".join(f"{share:.2f}" for share in shares)
    if "alone_us" in found:
        alone = ", ".join(f"{us:.1f}" for us in found["alone_us"])
        said += f"; {alone} us an expert alone, one every {found['both_us']:.1f} us together"
    return f"{name}: {said}"


def main() -> None:
    """Measure what was asked for, and print it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", nargs="+", default=["cuda:0", "cuda:1"])
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--gib", type=float, default=1.0, help="What each device gets a round.")
    parser.add_argument("--expert-mib", type=float, default=6.75)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    expert_bytes, total = int(options.expert_mib * MIB), int(options.gib * GIB)
    with ExitStack() as closing:
        devices = [closing.enter_context(et.open_device(name)) for name in options.devices]
        found = measure(devices, options.ways, expert_bytes, total, options.rounds)
    if options.json:
        print(json.dumps({"devices": options.devices, **found}))
        return
    for name, each in found.items():
        print(text_of(name, each, found.get("copies"), options.devices))
        if each.get("l1_hits") or each.get("file_reads"):
            print(f"not all fills came from L2: {each}")


if __name__ == "__main__":
    main()
