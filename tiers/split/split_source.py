"""One source for the tensor shards of several devices: a matrix that one device misses is read once, for all of them.

    device 0 misses ─► read the full matrix  ─┬─► its shard, where it asked for it
                                              └─► other devices' shards ─► wait to be taken
    device 1 misses ─► its shard waits? ─► taken

The devices of a tensor split run the same layers on the same tokens, so the other device is about
to miss what one device misses. Waiting shards lie in plain memory within a limit; beyond it, the oldest shard is
dropped, and is read again when its device asks for it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from expertier.errors import SourceError
from expertier.interrupts import wait_interruptibly
from expertier.tiers.file.byte_source import ByteSource
from expertier.tiers.file.counted_source import CountedSource
from expertier.tiers.model.span import Span
from expertier.tiers.shared.stats import FileStats
from expertier.tiers.split.split_table import ShardRef, SplitTable
from expertier.tiers.split.waiting_shards import Bytes, WaitingShards
from expertier.units import MIB

_WAITING_BYTES = 256 * MIB
_WAITING_STEPS = 2
"""The waiting shards have room for the misses of this many decode steps of one layer, however large experts are."""


@dataclass(frozen=True, slots=True)
class SplitReads:
    """How much was read of the files, and how the shards came to their devices.

    `handed_over` shards were read for another device's miss and taken later; `dropped` shards were read in vain. Shards
    of `waiting_bytes` wait now; `waiting_peak_bytes` is the most that ever waited, within `waiting_limit_bytes`.
    """

    file: FileStats
    handed_over: int
    dropped: int
    waiting_bytes: int
    waiting_peak_bytes: int
    waiting_limit_bytes: int


def waiting_limit(table: SplitTable) -> int:
    """Return how many bytes of shards may wait: a few hundred MiB, as one device may run ahead of another.

    It is at least as much as a few decode steps can miss, so that no step reads a matrix twice, and never more than the
    model's experts.
    """
    full = table.full_table
    step = max(layer.top_k * layer.expert_bytes for layer in full.layers)
    return min(full.expert_bytes_total, max(_WAITING_BYTES, _WAITING_STEPS * step))


class SplitSource:
    """Reads full expert matrices from `source` and hands out their shards to the devices of `table`. Thread-safe."""

    def __init__(self, source: ByteSource, table: SplitTable, *, waiting_bytes: int | None = None) -> None:
        """Read nothing yet. `waiting_bytes` bounds the shards that wait for other devices (`waiting_limit`)."""
        self._source = CountedSource(source)
        self._table = table
        self._changed = threading.Condition()
        self._reading: set[ShardRef] = set()
        self._waiting = WaitingShards(waiting_limit(table) if waiting_bytes is None else waiting_bytes)

    def of_device(self, device: int) -> ShardSource:
        """Return the source of one device's shards."""
        return ShardSource(self, device)

    def read_into(self, device: int, span: Span, buffer: memoryview) -> None:
        """Fill `buffer` with the device's shard at `span` of its imagined file.

        Raises what the source raises; a device that asked for another shard of the same matrix
        meanwhile then reads the matrix itself.
        """
        if len(buffer) != span.n_bytes:
            raise ValueError(
                f"asked for {span.n_bytes} bytes into a buffer of {len(buffer)}: they must be equal"
            )
        ref = self._table.find(device, span)
        with self._changed:
            while (ref, device) not in self._waiting and ref in self._reading:
                wait_interruptibly(self._changed)
            waiting = self._waiting.take((ref, device))
            if waiting is None:
                self._reading.add(ref)
        target = np.frombuffer(buffer, np.uint8)
        if waiting is not None:
            target[:] = waiting
            return
        others: dict[int, Bytes] = {}
        try:
            others = self._read(ref, device, target)
        finally:
            with self._changed:
                self._reading.remove(ref)
                for other, shard in others.items():
                    self._waiting.put((ref, other), shard)
                self._changed.notify_all()

    def will_need(self, device: int, spans: Sequence[Span]) -> None:
        """Tell the files which full matrices are about to be read."""
        refs = [self._table.find(device, span) for span in spans]
        with self._changed:
            missing = [ref for ref in refs if (ref, device) not in self._waiting]
        self._source.will_need([self._full_span(ref) for ref in missing])

    def stats(self) -> SplitReads:
        """Return the counts so far."""
        file = self._source.stats()
        with self._changed:
            shards = self._waiting
            return SplitReads(
                file, shards.taken, shards.dropped, shards.n_bytes, shards.peak_bytes, shards.limit_bytes
            )

    def forget(self) -> None:
        """Drop the shards that wait: the devices start anew."""
        with self._changed:
            self._waiting.clear()

    def check_valid(self) -> None:
        """Assert that no read is under way, and that the bytes of the waiting shards are counted."""
        with self._changed:
            assert not self._reading, f"reads that never ended: {self._reading}"
            self._waiting.check_valid()

    def _full_span(self, ref: ShardRef) -> Span:
        return self._table.shards[0][ref.matrix].full.span(ref.expert)

    def _read(self, ref: ShardRef, device: int, target: Bytes) -> dict[int, Bytes]:
        """Read the full matrix, write the device's shard to `target` and return the shards of the other devices."""
        span = self._full_span(ref)
        try:
            full = np.empty(span.n_bytes, np.uint8)
            others = {
                other: np.empty(shards[ref.matrix].matrix.expert_bytes, np.uint8)
                for other, shards in enumerate(self._table.shards)
                if other != device
            }
        except MemoryError as error:
            raise SourceError(
                f"no memory for {2 * span.n_bytes} bytes, one matrix of an expert and its shards; free some"
            ) from error
        self._source.read_into(span, full.data)
        for number, shards in enumerate(self._table.shards):
            shards[ref.matrix].gather(full, target if number == device else others[number])
        return others


class ShardSource:
    """One device's shards: a `HintedSource` for its `TierManager`."""

    def __init__(self, split: SplitSource, device: int) -> None:
        """Serve device number `device` of the split."""
        self._split = split
        self._device = device

    def read_into(self, span: Span, buffer: memoryview) -> None:
        """Fill `buffer` with the shard at `span`; raises what the source of all devices raises."""
        self._split.read_into(self._device, span, buffer)

    def will_need(self, spans: Sequence[Span]) -> None:
        """Say which shards are read next. A hint: raises nothing."""
        self._split.will_need(self._device, spans)
