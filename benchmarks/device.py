"""What a GPU device costs over the driver's own calls, side by side on the same GPU.

`python benchmarks/device.py [--device cuda:0] [--json] [--arena-gib 8] [--quick]` measures and prints:

copies     pinned host-to-device copies of an expert's size through the device, against a bare loop of driver calls
boundary   a boundary move with half of the experts surviving, planning included, against one copy of the same bytes:
           a row for each slot, and as the tiers send it, neighbours that move together in one row
pinned     what a pinned block takes, beside what is counted for it
overlap    filling pinned blocks from pageable memory, copying the blocks in, and both at once
gather     one kernel that reads pinned memory, against a driver's copy for each expert

`--planning` times nothing but the planning of the boundary moves, for which it needs no GPU.

Each number is the median of several rounds, with the smallest and the largest.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from device_costs.boundary import measure_boundary, show_planning
from device_costs.copies import measure_copies, measure_gather, measure_overlap
from device_costs.pinned import measure_pinned

from expertier.hip import open_device
from expertier.hip.gpu.device import GpuDevice
from expertier.units import GIB, KIB, MIB


def measure(device: GpuDevice, *, rounds: int, arena: int, total: int) -> dict[str, Any]:
    """Run all of them."""
    gpu = device.gpu
    return {
        "device": {
            "name": device.name,
            "product": gpu.product(),
            "architecture": gpu.architecture(),
            "driver": gpu.driver.traits.version_text(gpu.version),
            "kernels": device.mover.kernels,
            "without_kernels_because": device.mover.without_kernels_because,
        },
        "rounds": rounds,
        "copies": measure_copies(device, rounds, total),
        "boundary": measure_boundary(device, rounds, arena),
        "pinned": measure_pinned(device, 64 if total > 64 * MIB else 4),
        "overlap": measure_overlap(device, rounds, total),
        "gather": measure_gather(device, rounds, min(total, 24 * 8 * MIB)),
    }


def show(found: dict[str, Any]) -> None:
    """Print as text."""
    print(found["device"], f"medians of {found['rounds']} rounds (smallest to largest)")

    def text(values: dict[str, float]) -> str:
        return f"{values['median']:.3f} ({values['min']:.3f} to {values['max']:.3f})"

    print("pinned host-to-device copies: GB/s through the device, by bare driver calls, ratio")
    for row in found["copies"]:
        speeds = f"{row['device_gb_s']:7.2f} {row['driver_gb_s']:7.2f}"
        print(f"  {row['bytes'] / MIB:4.1f} MiB {speeds}  {text(row['speed_of_driver'])}")
    print("boundary move: ms of one copy of the bytes, of the move, of its planning; ratio")
    for row in found["boundary"]:
        counts = f"{row['rows']} rows, {row['pieces']} pieces, {row['launches']} launches"
        print(
            f"  {row['slots']} slots of {row['slot_bytes'] / MIB} MiB, {row['form']}: "
            f"{row['moved_bytes'] / GIB:.2f} GiB in {counts}: {text(row['one_copy_ms'])}, "
            f"{text(row['move_ms'])}, {text(row['planning_ms'])}; {text(row['move_over_copy'])}"
        )
        chunks = (f"{int(n) // KIB}: {ratio['median']:.3f}" for n, ratio in row["over_copy_by_chunk"].items())
        print("    ratio with KiB a block of threads: " + ", ".join(chunks))
    print("pinned blocks: bytes asked, counted, resident, unavailable to others; µs of one allocation")
    for row in found["pinned"]:
        sizes = [row[name] for name in ("bytes", "counted_bytes", "resident_bytes", "unavailable_bytes")]
        print("  " + ", ".join(f"{value:,.0f}" for value in sizes) + f"; {row['alloc_us']:.1f}")
    print("overlap of pinned fills and copies:", json.dumps(found["overlap"]))
    print("gather against copies: µs of copies, of the best gather, its chunk; ratio")
    for row in found["gather"]:
        best = row["gather_us"][str(row["best_chunk"])]
        print(
            f"  {row['experts']:2d} of {row['bytes'] / MIB:.1f} MiB: {text(row['copies_us'])}, {text(best)}, "
            f"{row['best_chunk'] // KIB} KiB; {text(row['gather_over_copies'])}"
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="auto", help="as open_device takes it")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--arena-gib", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--planning", action="store_true", help="time planning alone, without a GPU")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that everything runs")
    options = parser.parse_args()
    if options.planning:
        show_planning(options.rounds, int(options.arena_gib * GIB))
        return
    with open_device(options.device) as device:
        if not isinstance(device, GpuDevice):
            raise SystemExit(f"{device.name} is no GPU")
        arena, total = int(options.arena_gib * GIB) // MIB * MIB, 512 * MIB
        if options.quick:
            arena, total = 96 * MIB, 16 * MIB
        found = measure(device, rounds=2 if options.quick else options.rounds, arena=arena, total=total)
    if options.json:
        print(json.dumps(found))
    else:
        show(found)


if __name__ == "__main__":
    main()
