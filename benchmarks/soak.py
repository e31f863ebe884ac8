"""Uses everything at once for minutes: are all bytes right, are budgets obeyed, and is nothing left over?

`python benchmarks/soak.py --minutes 10 --threads 8 [--device fake] [--json]`. Threads acquire, prefetch, move the
boundary and resize the host pool while reads, copies and allocations fail and the routing changes its topic. The
bytes of every lease are compared with the source's; on the fake device by kernels that run when their stream gets
there. The tiers are closed and opened again every `--epoch` seconds. Exit status 1 for wrong bytes, an error that
nobody injected, a budget exceeded, or RSS or descriptors that grow after the warm-up.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import json
import logging
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil

import expertier as et
from expertier.errors import BudgetError, BusyError, DeviceError, SourceError
from expertier.hip.faults.device import FaultyDevice
from expertier.hip.faults.plan import FaultPlan
from expertier.hip.host import HostDevice
from expertier.testing import FakeDevice, FaultySource, LayerShape, PatternSource, synthetic_table
from expertier.tiers.access.lease import ExpertGroup, Lease
from expertier.tiers.file.source import FileSource
from expertier.tiers.model.file_identity import FileIdentity
from expertier.tiers.model.model_file import ModelFile
from expertier.tiers.model.table import ExpertTable
from expertier.units import MIB

TOP_K = 4
POOLS = (0, MIB // 2, 1 * MIB, 2 * MIB)
OPERATIONS = (
    "read",
    "verify",
    "copy_in",
    "alloc_pinned",
    "copy_within",
    "zero",
    "create_event",
    "record_event",
)
WARM_UP = 0.25  # share of the time; slopes are taken of the rest
SHORTEST_SLOPE_S = 30.0
MOST_RSS_GROWTH_BYTES = 8 * MIB  # over the whole of the slope's time


def write_model(folder: Path) -> tuple[ExpertTable, PatternSource]:
    """Write a file of patterns, and return its table and what its bytes are."""
    shapes = [
        LayerShape(32, 128, 64),
        LayerShape(32, 128, 64, ("Q4_0", "Q4_0", "Q8_0")),
        LayerShape(24, 128, 96),
    ] * 2
    table = synthetic_table(shapes, top_k=TOP_K)
    source = PatternSource()
    path = folder / "soak.gguf"
    with path.open("wb") as file:
        for begin, end in table.expert_ranges:
            file.seek(begin)
            for layer in table.layers:
                for matrix in layer.matrices:
                    if matrix.file_offset == begin:
                        file.writelines(source.expected(matrix.span(i)) for i in range(layer.n_experts))
            file.truncate(max(end, table.file_bytes))
    files = (ModelFile(path, 0, FileIdentity.of(path.stat())),)
    return dataclasses.replace(table, files=files), source


class WatchedDevice(FaultyDevice):
    """Records the largest number of pinned bytes."""

    peak_pinned_bytes = 0

    def alloc_pinned(self, n_bytes: int) -> int:
        """Allocate."""
        address = super().alloc_pinned(n_bytes)
        self.peak_pinned_bytes = max(self.peak_pinned_bytes, self.pinned_bytes)
        return address


class Soak:
    """One set of tiers under load, for one epoch."""

    def __init__(
        self, table: ExpertTable, expected: dict[tuple[int, int], list[bytes]], options: argparse.Namespace
    ) -> None:
        """Open the tiers."""
        self.table, self.expected = table, expected
        self.plan = FaultPlan()
        self.inner = FakeDevice(pinned_power_of_two=True) if options.device == "fake" else HostDevice()
        self.device = WatchedDevice(self.inner, self.plan)
        self.file = FileSource(table.files)
        cache_bytes = sum(demand.bytes_for(8) for demand in table.layer_demands()) + 300_000
        config = et.TierConfig(
            expert_cache_bytes=cache_bytes, host_pool_bytes=max(POOLS), fill_threads=options.fill_threads
        )
        self.tiers = et.TierManager(
            table, device=self.device, source=FaultySource(self.file, self.plan), config=config
        )
        self.pool_bytes = max(POOLS)
        self.pool_turn, self.compute_turn = threading.Lock(), threading.Lock()
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.stop = threading.Event()

    # ---- what a thread does

    def work(self, number: int, seed: int) -> None:
        """Mix everything until the end."""
        random_ = random.Random(seed * 1000 + number)
        has_streams = self.inner.has_streams
        stream = self.inner.create_stream() if has_streams else None
        counts: Counter[str] = Counter()
        actions = (
            self.lease,
            self.lease,
            self.nested,
            self.prefetch,
            self.compute,
            self.resize,
            self.fail,
            self.look,
        )
        weights = (50, 10, 8, 12, 2, 1, 6, 2)
        topic = 0
        try:
            while not self.stop.is_set():
                topic += random_.random() < 0.002  # another set of experts is hot now
                action = random_.choices(actions, weights)[0]
                counts[action.__name__] += 1
                try:
                    action(random_, topic, stream)
                except (SourceError, DeviceError) as error:
                    if "injected" not in str(error):
                        raise
                    counts["failed as planned"] += 1
                except BusyError:
                    counts["busy"] += 1
        except BaseException as error:
            self.wrong.append(f"thread {number}: {error!r}")
            logging.exception("thread %d", number)
            self.stop.set()
        finally:
            self.counts.update(counts)  # under the interpreter's lock
            if stream is not None:
                while self.inner.queued(stream):
                    self.inner.synchronize()
                self.inner.destroy_stream(stream)

    def experts(self, random_: random.Random, layer: int, topic: int) -> list[int]:
        """Draw experts of a layer, a few of them far more often than others; which ones is the topic."""
        n_experts = self.table.layers[layer].n_experts
        n = random_.choice((1, 2, TOP_K, TOP_K, TOP_K, 12))
        return [(int(random_.paretovariate(0.8)) + 7 * topic + 3 * layer) % n_experts for _ in range(n)]

    def lease(self, random_: random.Random, topic: int, stream: int | None) -> None:
        """Acquire, compare, release."""
        layer = random_.randrange(self.table.n_layers)
        on = stream if random_.random() < 0.8 else None
        with self.tiers.acquire(layer, self.experts(random_, layer, topic), on) as lease:
            for group in lease.groups:
                self.compare(lease, group, on)

    def nested(self, random_: random.Random, topic: int, stream: int | None) -> None:
        """Hold experts of two layers."""
        first, second = random_.sample(range(self.table.n_layers), 2)
        with (
            self.tiers.acquire(first, self.experts(random_, first, topic)[:3], stream) as outer,
            self.tiers.acquire(second, self.experts(random_, second, topic)[:3], stream) as inner,
        ):
            for lease in (inner, outer):
                if lease.held is not None:
                    self.compare(lease, lease.held, stream)

    def compare(self, lease: Lease, group: ExpertGroup, stream: int | None) -> None:
        """Compare all bytes of a group, when its stream gets there."""
        places = [lease.view(matrix.role) for matrix in self.table.layers[lease.layer].matrices]
        pairs = list(zip(group.experts.tolist(), group.slots.tolist(), strict=True))
        layer = lease.layer

        def kernel() -> None:
            for expert, slot in pairs:
                for place, expected in zip(places, self.expected[layer, expert], strict=True):
                    if ctypes.string_at(place.address + slot * place.stride_bytes, len(expected)) != expected:
                        self.wrong.append(f"wrong bytes: expert {expert} of layer {layer} in slot {slot}")
                        self.stop.set()
            self.counts["experts compared"] += len(pairs)

        if stream is None or not isinstance(self.inner, FakeDevice):
            kernel()
        else:
            self.inner.launch(kernel, stream)

    def prefetch(self, random_: random.Random, topic: int, _stream: int | None) -> None:
        """Ask for experts, or cancel."""
        layer = random_.randrange(self.table.n_layers)
        if random_.random() < 0.1:
            self.tiers.cancel_prefetches(random_.choice((None, layer)))
        else:
            self.tiers.prefetch(
                layer, self.experts(random_, layer, topic), into=random_.choice(("l1", "l1", "l2"))
            )

    def compute(self, random_: random.Random, _topic: int, _stream: int | None) -> None:
        """Reserve memory, write all over it, find it untouched, and give it back."""
        if not self.compute_turn.acquire(blocking=False):
            return
        try:
            n_bytes = random_.randrange(1, 400_000)
            with suppress(BudgetError):
                region = self.tiers.reserve_compute(n_bytes)
                ctypes.memset(region.address, 0xAB, n_bytes)
                time.sleep(random_.random() * 0.01)
                if ctypes.string_at(region.address, n_bytes) != b"\xab" * n_bytes:
                    self.wrong.append("someone wrote to the compute region")
                    self.stop.set()
                self.tiers.release_compute()
                if random_.random() < 0.3:
                    self.tiers.lower_boundary()
        finally:
            self.tiers.release_compute()
            self.compute_turn.release()

    def resize(self, random_: random.Random, _topic: int, _stream: int | None) -> None:
        """Give the host pool another size, and see it go there."""
        if self.pool_turn.acquire(blocking=False):
            try:
                self.pool_bytes = random_.choice(POOLS)
                self.tiers.resize_host_pool(self.pool_bytes)
                most = self.tiers.stats().l2.used_bytes
                for _ in range(20):
                    used = self.tiers.stats().l2.used_bytes
                    if used > max(self.pool_bytes, most):
                        self.wrong.append(
                            f"the host pool of {self.pool_bytes} bytes grew from {most} to {used}"
                        )
                        self.stop.set()
                    most = used
            finally:
                self.pool_turn.release()

    def fail(self, random_: random.Random, _topic: int, _stream: int | None) -> None:
        """Have a call fail soon."""
        self.plan.arm(random_.choice(OPERATIONS), random_.randrange(1, 40))

    def look(self, _random: random.Random, _topic: int, _stream: int | None) -> None:
        """Look at sizes and counts."""
        stats = self.tiers.stats()
        if stats.l1.used_bytes + stats.l1.compute_bytes > stats.l1.budget_bytes + 128:
            self.wrong.append("the slots and the compute region exceed the slab")
            self.stop.set()

    # ---- the whole

    def run(self, seconds: float, n_threads: int, seed: int, sample: list[tuple[float, int, int]]) -> None:
        """Run for a while, taking (time, RSS, descriptors) every second; then check and close."""
        threads = [threading.Thread(target=self.work, args=(i, seed)) for i in range(n_threads)]
        for thread in threads:
            thread.start()
        process, end = psutil.Process(), time.monotonic() + seconds
        random_, next_sample = random.Random(seed), 0.0
        while time.monotonic() < end and not self.stop.is_set():
            if isinstance(self.inner, FakeDevice):
                for stream in self.inner.streams:
                    with suppress(KeyError, DeviceError):  # a thread may just have ended its stream
                        self.inner.advance(stream, random_.randrange(20))
            if time.monotonic() >= next_sample:
                sample.append((time.monotonic(), process.memory_info().rss, process.num_fds()))
                next_sample = time.monotonic() + 1.0
            time.sleep(0.002)
        self.stop.set()
        for thread in threads:
            thread.join()
        self.plan.disarm()
        if self.wrong:
            return
        self.tiers.drain()
        self.inner.synchronize()
        self.tiers.check_valid()
        stats = self.tiers.stats()
        peak = self.device.peak_pinned_bytes - stats.l2.bounce_bytes
        if max(peak, stats.l2.peak_bytes) > max(POOLS):
            self.wrong.append(f"{peak} bytes of host pool at its peak, {max(POOLS)} were allowed")
        for tier, names in {
            "l1": ("hits", "misses", "evictions"),
            "l2": ("hits", "misses", "evictions", "refusals", "given_back_bytes"),
            "file": ("reads", "failures"),
            "moves": ("moves", "dropped"),
            "prefetch": ("asked", "done", "dropped", "failed"),
        }.items():
            for name in names:
                self.counts[f"{tier} {name}"] += stats.as_dict()[tier][name]
        self.counts.update({f"injected {name}": n for name, n in self.plan.injected.items()})
        self.tiers.close()
        self.file.close()
        self.inner.close()


def slopes(sample: list[tuple[float, int, int]]) -> dict[str, float]:
    """Return the slopes after the warm-up, and how long they were taken; empty when that is too short to tell."""
    if not sample:
        return {}
    begin, end = sample[0][0], sample[-1][0]
    kept = np.array([row for row in sample if row[0] >= begin + WARM_UP * (end - begin)])
    seconds = float(kept[-1, 0] - kept[0, 0])
    if seconds < SHORTEST_SLOPE_S:
        return {}
    rss, descriptors = (float(np.polyfit(kept[:, 0], kept[:, column], 1)[0]) for column in (1, 2))
    return {
        "seconds": seconds,
        "rss_bytes_per_s": rss,
        "descriptors_per_s": descriptors,
        "rss_bytes": float(kept[-1, 1]),
    }


def main() -> int:
    """Run the epochs and print what happened."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--fill-threads", type=int, default=3)
    parser.add_argument("--device", choices=("host", "fake"), default="host")
    parser.add_argument(
        "--epoch", type=float, default=20.0, help="seconds until the tiers are closed and opened again"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    logging.getLogger("expertier").setLevel(logging.ERROR)
    counts: Counter[str] = Counter()
    sample: list[tuple[float, int, int]] = []
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        table, source = write_model(Path(folder))
        expected = {
            (layer, expert): [source.expected(span) for span in table.span(layer, expert)]
            for layer in range(table.n_layers)
            for expert in range(table.layers[layer].n_experts)
        }
        written = table.path.stat()
        end = time.monotonic() + 60 * options.minutes
        while time.monotonic() < end and not wrong:
            soak = Soak(table, expected, options)
            counts["epochs"] += 1
            soak.run(
                min(options.epoch, end - time.monotonic()),
                options.threads,
                options.seed + counts["epochs"],
                sample,
            )
            counts.update(soak.counts)
            wrong += soak.wrong
        if FileIdentity.of(table.path.stat()) != FileIdentity.of(written):
            wrong.append("the model's file was written to")
    slope = slopes(sample)
    if slope:
        if slope["rss_bytes_per_s"] * slope["seconds"] > MOST_RSS_GROWTH_BYTES:
            wrong.append(f"RSS grows by {slope['rss_bytes_per_s'] * 60 / MIB:.3f} MiB a minute")
        if slope["descriptors_per_s"] * slope["seconds"] > 1:
            wrong.append(f"descriptors grow by {slope['descriptors_per_s'] * 60:.3f} a minute")
    if options.json:
        print(json.dumps({"counts": dict(counts), "slopes": slope, "wrong": wrong}))
        return 1 if wrong else 0
    for name, count in sorted(counts.items()):
        print(f"{name:28} {count:12,}")
    if slope:
        print(f"after the warm-up, {slope['seconds']:.0f} s at {slope['rss_bytes'] / MIB:.1f} MiB of RSS:")
        print(f"RSS slope                    {slope['rss_bytes_per_s'] * 60 / MIB:+12.4f} MiB a minute")
        print(f"descriptor slope             {slope['descriptors_per_s'] * 60:+12.4f} a minute")
    print("\n".join(wrong) if wrong else "all bytes right, budgets obeyed, nothing left over")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
