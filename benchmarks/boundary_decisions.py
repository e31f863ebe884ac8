"""What does a move of the boundary under an engine cost whatever it moves?

    python benchmarks/boundary_decisions.py [--layers 48] [--experts 128] [--runs 20]

Tiers in host memory with experts of a few KiB, so that bytes count for little: half of the slots beside an eighth of
all expert bytes to compute in. Each run moves the boundary down to a sixteenth of that and up again, as the proxy has
it done: who stays, their places, zeros, tables, and the new layout for the plugin, all that `SlabCompute` does but for
what the device does. Medians, milliseconds of the thread's own time a move. The first move to each of the two positions
is apart: its layout is not known yet.
"""

from __future__ import annotations

import argparse
import statistics
import time

import expertier as et
from expertier.engine_adapter import proxy_abi as abi
from expertier.engine_adapter.bound_structs import BoundStructs
from expertier.hip.device import Moves
from expertier.hip.host import HostDevice
from expertier.hip.zeros import Pieces
from expertier.testing import LayerShape, synthetic_table
from expertier.tiers.span import Span

TOP_K = 8


class NothingSource:
    """A source whose bytes nobody looks at."""

    def read_into(self, span: Span, buffer: memoryview) -> None:
        """Leave the buffer as it is."""


class CountedDevice(HostDevice):
    """The host, with the time that it takes for moves apart; it counts them, too."""

    def __init__(self) -> None:
        """Start at 0."""
        super().__init__()
        self.seconds = 0.0
        self.moves = self.zeros = 0

    def relocate(self, moves: Moves, zeros: Pieces, stream: int = 0) -> None:
        """Move and zero."""
        start = time.thread_time()
        self.copy_within(moves, stream)
        for address, n_bytes in zeros.tolist():
            self.zero(address, n_bytes, stream)
        self.seconds += time.thread_time() - start
        self.moves += len(moves)
        self.zeros += len(zeros)

    def finish(self) -> None:
        """Do nothing: all is done."""


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--layers", type=int, default=48)
    options.add_argument("--experts", type=int, default=128)
    options.add_argument("--runs", type=int, default=20)
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
        structs = BoundStructs(tiers.bind_engine(), abi.FillCallback(), abi.LoadCallback())
        wide = tiers.compute_bytes
        down: list[float] = []
        up: list[float] = []
        device.moves = device.zeros = 0
        for _ in range(given.runs + 1):
            for n_bytes, seconds in ((wide // 16, down), (wide, up)):
                device.seconds = 0.0
                start = time.thread_time()
                tiers.move_boundary(n_bytes)
                structs.rewrite(tiers.engine_layout())
                _ = tiers.n_cut_layers, tiers.compute_bytes, tiers.slots_are_sound
                seconds.append(time.thread_time() - start - device.seconds)
        tiers.unbind_engine()
    n_moves = 2 * (given.runs + 1)
    print(
        f"{given.layers} layers of {given.experts} experts, {given.runs} moves each way, of "
        f"{device.moves / n_moves:.0f} pieces and {device.zeros / n_moves:.0f} zeros on average"
    )
    for name, (first, *later) in (("down", down), ("up", up)):
        low, high = min(later) * 1e3, max(later) * 1e3
        middle = statistics.median(later) * 1e3
        print(f"{name}: {middle:.2f} ms ({low:.2f} to {high:.2f}), the first {first * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
