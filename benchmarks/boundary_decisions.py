"""What does a move of the boundary under an engine cost whatever it moves?

    python benchmarks/boundary_decisions.py [--layers 48] [--experts 128] [--runs 20]

Tiers in host memory with experts of a few KiB, so that bytes count for little: half of the slots beside an eighth of
all expert bytes to compute in. Each run moves the boundary down to a sixteenth of that and up again, as the proxy has
it done: who stays, their places, zeros, tables, and the new layout for the plugin. Medians, milliseconds of the
thread's own time a move.
"""

from __future__ import annotations

import argparse
import statistics
import time

import expertier as et
from expertier.testing import LayerShape, synthetic_table
from expertier.tiers.span import Span

TOP_K = 8


class NothingSource:
    """A source whose bytes nobody looks at."""

    def read_into(self, span: Span, buffer: memoryview) -> None:
        """Leave the buffer as it is."""


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
    with et.TierManager(
        table,
        device=et.open_device("host"),
        config=config,
        source=NothingSource(),
        compute_bytes=all_bytes // 8,
    ) as tiers:
        for layer in range(given.layers):
            for first in range(0, given.experts // 2 - TOP_K, TOP_K):
                tiers.acquire(layer, range(first, first + TOP_K)).release()
        tiers.bind_engine()
        wide = tiers.compute_bytes
        down, up = [], []
        for _ in range(given.runs):
            for n_bytes, seconds in ((wide // 16, down), (wide, up)):
                start = time.thread_time()
                tiers.move_boundary(n_bytes)
                tiers.engine_layout()
                seconds.append(time.thread_time() - start)
        tiers.unbind_engine()
    print(f"{given.layers} layers of {given.experts} experts, {len(down)} moves each way")
    for name, seconds in (("down", down), ("up", up)):
        low, high = min(seconds) * 1e3, max(seconds) * 1e3
        print(f"{name}: {statistics.median(seconds) * 1e3:.1f} ms ({low:.1f} to {high:.1f})")


if __name__ == "__main__":
    main()
