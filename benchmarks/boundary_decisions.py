"""What does a move of the boundary under an engine cost, apart from the bytes that it moves?

    python benchmarks/boundary_decisions.py [--layers 48] [--experts 128] [--runs 20] [--evict-mib 0]

Tiers in host memory with experts of a few KiB, so that bytes count for little: half of the slots beside an eighth of
all expert bytes to compute in. Each run moves the boundary down to a sixteenth of that and up again, as the proxy does:
the survivors and their places, zeros, tables, and the new layout for the plugin, which is all work of `SlabCompute`
except the device's. Numbers are medians in milliseconds of the thread's own time for a move: before the device has its
work, while it works, and after it has been waited for. A token always waits for the first and the last, and waits for
the second where the device is quicker. The first move to each position is separate, as its layout is not known yet.

With `--evict-mib` so much memory is read before each move, as decoding does between two moves, so that no cache holds
data that the move needs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass

import numpy as np

import expertier as et
from expertier.engine_adapter.abi import structs as abi
from expertier.engine_adapter.binding.bound_structs import BoundStructs
from expertier.hip.device import Moves
from expertier.hip.host import HostDevice
from expertier.hip.zeros import Pieces
from expertier.testing import LayerShape, synthetic_table
from expertier.tiers.model.span import Span

TOP_K = 8


class NothingSource:
    """A source whose bytes are never looked at."""

    def read_into(self, span: Span, buffer: memoryview) -> None:
        """Leave the buffer as it is."""


@dataclass
class Took:
    """Seconds of the thread's own time that one move took, without the device's work."""

    before: float
    meanwhile: float
    after: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.before + self.meanwhile + self.after


class CountedDevice(HostDevice):
    """The host device, which notes when it got its work and when it was waited for, and counts moves and zeros."""

    def __init__(self) -> None:
        """Start at 0."""
        super().__init__()
        self.got_work = self.has_work = self.awaited = 0.0
        self.moves = self.zeros = 0

    def relocate(self, moves: Moves, zeros: Pieces, stream: int = 0) -> None:
        """Move and zero."""
        self.got_work = time.thread_time()
        self.copy_within(moves, stream)
        for address, n_bytes in zeros.tolist():
            self.zero(address, n_bytes, stream)
        self.moves += len(moves)
        self.zeros += len(zeros)
        self.has_work = time.thread_time()

    def finish(self) -> None:
        """Note the time at which all work is done."""
        self.awaited = time.thread_time()


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--layers", type=int, default=48)
    options.add_argument("--experts", type=int, default=128)
    options.add_argument("--runs", type=int, default=20)
    options.add_argument("--evict-mib", type=int, default=0)
    given = options.parse_args()

    shape = LayerShape(n_experts=given.experts, n_embd=64, n_ff=32)
    table = synthetic_table([shape] * given.layers, top_k=TOP_K)
    all_bytes = sum(demand.bytes_for(given.experts) for demand in table.layer_demands())
    config = et.TierConfig(expert_cache_bytes=all_bytes // 2, host_pool_bytes=0, fill_threads=0)
    device = CountedDevice()
    with et.TierManager(
        table, device=device, config=config, source=NothingSource(), compute_bytes=all_bytes // 8
    ) as tiers:
        for layer in range(given.layers):
            for first in range(0, given.experts // 2 - TOP_K, TOP_K):
                tiers.acquire(layer, range(first, first + TOP_K)).release()
        structs = BoundStructs(tiers.engine.bind(), abi.FillCallback(), abi.LoadCallback())
        wide = tiers.engine.compute_bytes

        def follow() -> None:
            structs.rewrite(tiers.engine.layout())
            _ = tiers.engine.n_cut_layers, tiers.engine.compute_bytes, tiers.engine.slots_are_sound

        down: list[Took] = []
        up: list[Took] = []
        other = np.ones(given.evict_mib << 17)
        device.moves = device.zeros = 0
        for _ in range(given.runs + 1):
            for n_bytes, moves in ((wide // 16, down), (wide, up)):
                other.sum()
                start = time.thread_time()
                tiers.engine.move_boundary(n_bytes, meanwhile=follow)
                end = time.thread_time()
                moves.append(
                    Took(device.got_work - start, device.awaited - device.has_work, end - device.awaited)
                )
        tiers.engine.unbind()
    n_done = 2 * (given.runs + 1)
    print(
        f"{given.layers} layers of {given.experts} experts, {given.runs} moves each way, of "
        f"{device.moves / n_done:.0f} pieces and {device.zeros / n_done:.0f} zeros on average"
    )
    for name, (new, *later) in (("down", down), ("up", up)):
        low, high = min(move.total for move in later) * 1e3, max(move.total for move in later) * 1e3
        before, meanwhile, after, middle = (
            statistics.median(getattr(move, part) for move in later) * 1e3
            for part in ("before", "meanwhile", "after", "total")
        )
        print(
            f"{name}: {middle:.3f} ms ({low:.2f} to {high:.2f}): {before:.3f} before the device has its work, "
            f"{meanwhile:.3f} meanwhile, {after:.3f} after it; the first {new.total * 1e3:.1f} ms"
        )


if __name__ == "__main__":
    main()
