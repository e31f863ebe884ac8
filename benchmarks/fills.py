"""How fast experts come from the file: against a bare preadv loop with the same threads, side by side.

`python benchmarks/fills.py [--json] [--threads N] [--rounds N] [--mib N] [--folder PATH]`

In each round, every way below reads the same experts in the same order; the ways take turns, and the ratios are
of one round, so that a busy machine slows both sides. Cold means that the file's pages were dropped before
(POSIX_FADV_DONTNEED). Below a virtual disk there may be the host's cache, which this program cannot drop, so cold
numbers mean that our page cache is empty, and not that every byte comes from the disk's platter or flash.

    bare                 N threads, os.preadv into a buffer of their own, which stays in the processor's cache
    bare + copy          the same, and a memmove of the bytes that were read
    bare, spread         N threads, os.preadv into as many places as there are slots: what slots cost by themselves
    bare, spread + copy  os.preadv into as many places as there are blocks of L2, and a memmove into places of slots
    source               N threads, FileSource.read_into through the page cache (`source, hints`: will_need first)
    fill                 TierManager.acquire of 8 missing experts at a time, with L2: file, block, slot
    fill, no pool        the same without L2: file, slot
    bare direct          O_DIRECT at aligned offsets, which is not where experts lie
    source direct        FileSource.read_into, the experts as they lie
    source auto          FileSource.read_into, which chooses the way by itself; with RAM enough for the file

A fill runs on N threads, too: N - 1 fill threads and the one that asks.

Sources are opened once, as for a model that runs; `auto` keeps in the next round what it has learnt.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import logging
import mmap
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import gguf
import numpy as np
from at_once import run_at_once

import expertier as et
from expertier.planner import PolicyKind
from expertier.tiers.config.file_mode import FileMode
from expertier.tiers.file.source import FileSource
from expertier.tiers.model.span import Span
from expertier.units import MIB

LAYERS, EXPERTS, TOP_K = 4, 64, 8
N_EMBD, N_FF = 2048, 512
ALIGNED = 4096
SLOTS = 16


def write_model(path: Path, n_bytes: int) -> None:
    """Write a GGUF of random Q8_0 experts, about `n_bytes` in all."""
    rng = np.random.default_rng(0)
    row = {"gate": (N_FF, N_EMBD), "up": (N_FF, N_EMBD), "down": (N_EMBD, N_FF)}
    matrix_bytes = N_EMBD * N_FF // 32 * 34
    experts = max(n_bytes // (LAYERS * 3 * matrix_bytes), SLOTS * 2)
    writer = gguf.GGUFWriter(path, "qwen3moe", use_temp_file=False)
    writer.add_block_count(LAYERS)
    writer.add_expert_used_count(TOP_K)
    kind = gguf.GGMLQuantizationType.Q8_0
    for layer, (role, (n_rows, n_columns)) in itertools.product(range(LAYERS), row.items()):
        shape = (experts, n_rows, n_columns // 32 * 34)
        data = rng.bytes(int(np.prod(shape)))
        writer.add_tensor(
            f"blk.{layer}.ffn_{role}_exps.weight",
            np.frombuffer(data, np.uint8).reshape(shape),
            raw_dtype=kind,
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with path.open("rb") as file:
        os.fsync(file.fileno())


Way = tuple[str, str | None, Callable[[], float]]
"""A way's name, the way that it is compared with, and the function that runs it and returns seconds."""


class Bench:
    """One model, the order in which its experts are read, and every way of reading them."""

    def __init__(self, path: Path, n_threads: int) -> None:
        self.path = path
        self.n_threads = n_threads
        self.table = et.ExpertTable.from_gguf(path)
        n_experts = self.table.layers[0].n_experts
        order = np.random.default_rng(1).permutation(n_experts).tolist()
        self.batches = [
            (layer, order[begin : begin + TOP_K])
            for begin in range(0, n_experts - TOP_K + 1, TOP_K)
            for layer in range(LAYERS)
        ]
        self.spans = [
            [span for expert in experts for span in self.table.span(layer, expert)]
            for layer, experts in self.batches
        ]
        self.n_bytes = sum(span.n_bytes for spans in self.spans for span in spans)
        self.largest = max(span.n_bytes for spans in self.spans for span in spans)
        self.descriptor = os.open(path, os.O_RDONLY)
        self.direct = os.open(path, os.O_RDONLY | os.O_DIRECT)
        self.places = [mmap.mmap(-1, n * self.largest) for n in (SLOTS * LAYERS * 3, SLOTS * 3)]
        for place in self.places:
            place.madvise(mmap.MADV_HUGEPAGE)  # as the host device does
            place.write(bytes(len(place)))
        self.sources = {mode: FileSource(self.table.files, mode) for mode in FileMode}

    def drop(self) -> None:
        """Empty the page cache of the file."""
        os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def warm(self) -> None:
        """Read the whole file into the page cache."""
        buffer = bytearray(4 * MIB)
        for offset in range(0, self.table.file_bytes, len(buffer)):
            os.preadv(self.descriptor, [buffer], offset)

    def over_threads(self, read: Callable[[Span, memoryview, memoryview], None]) -> float:
        """Return the seconds that N threads take for all spans; each has a buffer and one beside it."""
        spans = itertools.chain.from_iterable(self.spans)
        lock = threading.Lock()
        buffers = [
            [memoryview(mmap.mmap(-1, self.largest + 2 * ALIGNED)) for _ in range(2)]
            for _ in range(self.n_threads)
        ]
        for pair in buffers:
            for buffer in pair:
                buffer[:] = b"\1" * len(buffer)

        def work(number: int) -> None:
            buffer, beside = buffers[number]
            while True:
                with lock:
                    span = next(spans, None)
                if span is None:
                    return
                read(span, buffer, beside)

        return run_at_once([partial(work, number) for number in range(self.n_threads)])

    # ---- the ways

    def bare(self) -> float:
        def read(span: Span, buffer: memoryview, _: memoryview) -> None:
            assert os.preadv(self.descriptor, [buffer[: span.n_bytes]], span.offset) == span.n_bytes

        return self.over_threads(read)

    def bare_and_copy(self) -> float:
        def read(span: Span, buffer: memoryview, beside: memoryview) -> None:
            assert os.preadv(self.descriptor, [buffer[: span.n_bytes]], span.offset) == span.n_bytes
            ctypes.memmove(_address(beside), _address(buffer), span.n_bytes)

        return self.over_threads(read)

    def bare_spread(self, *, copy: bool) -> float:
        slots, blocks = (memoryview(place) for place in self.places)
        places = itertools.count()

        def read(span: Span, _: memoryview, __: memoryview) -> None:
            number = next(places)
            memory = blocks if copy else slots
            begin = number * self.largest % len(memory)
            into = memory[begin : begin + span.n_bytes]
            assert os.preadv(self.descriptor, [into], span.offset) == span.n_bytes
            if copy:
                ctypes.memmove(
                    _address(slots[number * self.largest % len(slots) :]), _address(into), span.n_bytes
                )

        return self.over_threads(read)

    def bare_direct(self) -> float:
        def read(span: Span, buffer: memoryview, _: memoryview) -> None:
            n_bytes = span.n_bytes // ALIGNED * ALIGNED
            assert os.preadv(self.direct, [buffer[:n_bytes]], span.offset // ALIGNED * ALIGNED) == n_bytes

        return self.over_threads(read)

    def source(self, mode: FileMode, *, hints: bool = False) -> float:
        source = self.sources[mode]
        firsts = {spans[0]: spans for spans in self.spans} if hints else {}

        def read(span: Span, buffer: memoryview, _: memoryview) -> None:
            if span in firsts:
                source.will_need(firsts[span])
            source.read_into(span, buffer[: span.n_bytes])

        return self.over_threads(read)

    def fill(self, mode: FileMode, *, cold: bool, pool: bool = True) -> float:
        """Acquire every batch; the slots of a layer are too few for any expert to be found again."""
        budget = sum(demand.bytes_for(SLOTS) for demand in self.table.layer_demands())
        config = et.TierConfig(
            expert_cache_bytes=budget,
            host_pool_bytes=pool * SLOTS * max(layout.block_bytes for layout in self.table.slot_layouts),
            fill_threads=self.n_threads - 1,
            policy=PolicyKind.LRU,
        )
        with (
            et.open_device("host") as device,
            et.TierManager(self.table, device=device, config=config, source=self.sources[mode]) as tiers,
        ):
            n_experts = self.table.layers[0].n_experts
            for layer, experts in self.batches[: SLOTS // TOP_K * LAYERS]:  # touch the memory
                tiers.acquire(layer, [n_experts - 1 - expert for expert in experts]).release()
            if cold:
                self.drop()
            before = tiers.stats()
            begin = time.perf_counter()
            for layer, experts in self.batches:
                tiers.acquire(layer, experts).release()
            seconds = time.perf_counter() - begin
            after = tiers.stats()
            n_read = after.file.bytes_read - before.file.bytes_read
            return seconds * self.n_bytes / n_read if n_read else float("nan")


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def measure(bench: Bench, rounds: int) -> list[dict[str, object]]:
    """Return a row for each way and state of the page cache: bytes a second and the ratio to the bare loop."""
    both: list[Way] = [
        ("bare", None, bench.bare),
        ("bare + copy", "bare", bench.bare_and_copy),
        ("source", "bare", lambda: bench.source(FileMode.PAGE_CACHE)),
        ("source, hints", "bare", lambda: bench.source(FileMode.PAGE_CACHE, hints=True)),
        ("source auto", "bare", lambda: bench.source(FileMode.AUTO)),
    ]
    page_cache = FileMode.PAGE_CACHE
    hot: list[Way] = [
        *both,
        ("bare, spread", "bare", lambda: bench.bare_spread(copy=False)),
        ("bare, spread + copy", "bare", lambda: bench.bare_spread(copy=True)),
        ("fill", "bare, spread + copy", lambda: bench.fill(page_cache, cold=False)),
        ("fill, no pool", "bare, spread", lambda: bench.fill(page_cache, cold=False, pool=False)),
    ]
    cold: list[Way] = [
        *both,
        ("fill", "bare", lambda: bench.fill(page_cache, cold=True)),
        ("fill, no pool", "bare", lambda: bench.fill(page_cache, cold=True, pool=False)),
        ("bare direct", "bare", bench.bare_direct),
        ("source direct", "bare direct", lambda: bench.source(FileMode.DIRECT)),
        ("fill direct", "bare direct", lambda: bench.fill(FileMode.DIRECT, cold=True)),
    ]
    rows = []
    for state, ways in (("hot", hot), ("cold", cold)):
        seconds: dict[str, list[float]] = {name: [] for name, _, _ in ways}
        for number in range(rounds):
            if state == "hot":
                bench.warm()
            for name, _, way in ways[number % len(ways) :] + ways[: number % len(ways)]:
                if state == "cold":
                    bench.drop()
                seconds[name].append(way())
        for name, against, _ in ways:
            rows.append(
                {
                    "cache": state,
                    "way": name,
                    "mib_per_s": _spread([bench.n_bytes / MIB / s for s in seconds[name]]),
                    "against": against,
                    "ratio": _ratio(seconds[name], seconds[against or name]),
                    "of_bare": _ratio(seconds[name], seconds["bare"]),
                }
            )
    return rows


def _ratio(seconds: Sequence[float], others: Sequence[float]) -> tuple[float, float, float]:
    """Return how fast the one was in terms of the other, round by round."""
    return _spread([b / a for a, b in zip(seconds, others, strict=True)])


def _spread(values: Sequence[float]) -> tuple[float, float, float]:
    return statistics.median(values), min(values), max(values)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--mib", type=int, default=800, help="how large the model is")
    parser.add_argument("--folder", type=Path, help="where to write it; a disk, not a tmpfs")
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # advice on budgets that are meant to be small
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = Path(folder) / "model.gguf"
        write_model(path, options.mib * MIB)
        bench = Bench(path, options.threads)
        rows = measure(bench, options.rounds)
    if options.json:
        print(json.dumps({"threads": options.threads, "n_bytes": bench.n_bytes, "rows": rows}))
        return
    print(
        f"{bench.n_bytes / MIB:.0f} MiB of experts in spans of {bench.largest / MIB:.2f} MiB, {options.threads} "
        f"threads, {options.rounds} rounds; median (least to most)"
    )
    for row in rows:
        speed, ratio = row["mib_per_s"], row["ratio"]
        said = f"  {row['cache']:4} {row['way']:19} {speed[0]:6.0f} ({speed[1]:.0f} to {speed[2]:.0f}) MiB/s"
        if row["against"] is not None:
            said += f", {ratio[0]:.2f} ({ratio[1]:.2f} to {ratio[2]:.2f}) of {row['against']}"
            if row["against"] != "bare":
                said += f", {row['of_bare'][0]:.2f} of bare"
        print(said)


if __name__ == "__main__":
    main()
