"""One source for the tensor shards of several devices: a matrix that one device misses is read once for all devices.

    device 0 misses ─► read the full matrix  ─┬─► device 0's shard ─► the buffer that device 0 gave
                                              └─► other devices' shards ─► wait to be taken
    device 1 misses ─► its shard waits? ─► taken

The devices of a tensor split run the same layers on the same tokens, so what one device misses, the other devices miss
soon after. Waiting shards lie in ordinary memory within a limit; beyond it, the oldest shard is dropped, and is read
again when its device asks for it.
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
    """How much was read from the files (`file`), and what became of the shards.

    `handed_over` counts shards that were read for another device's miss and taken later, `dropped` those that were
    dropped before they were taken. `waiting_bytes` is the size of the shards that wait now, `waiting_peak_bytes` its
    highest value so far, and `waiting_limit_bytes` its limit.
    """

    file: FileStats
    handed_over: int
    dropped: int
    waiting_bytes: int
    waiting_peak_bytes: int
    waiting_limit_bytes: int


def waiting_limit(table: SplitTable) -> int:
    """Return how many bytes of shards may wait: 256 MiB, because one device may run ahead of another.

    Where experts are large it is more: what two decode steps of one layer can miss, so that no step reads a matrix
    twice. It is never more than all experts of the model.
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

        Raises what the source raises. Another device that waits for its shard of the same matrix then reads the matrix
        itself.
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
        """Tell the source which full matrices are read next for the device's `spans`."""
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
        """Drop all waiting shards."""
        with self._changed:
            self._waiting.clear()

    def check_valid(self) -> None:
        """Assert that no read is running, and that the bytes of the waiting shards are counted."""
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
                f"no memory for {2 * span.n_bytes} bytes, one matrix of an expert and its shards; free some memory"
            ) from error
        self._source.read_into(span, full.data)
        for number, shards in enumerate(self._table.shards):
            shards[ref.matrix].gather(full, target if number == device else others[number])
        return others


class ShardSource:
    """The shards of one device, as a `HintedSource` for its `TierManager`."""

    def __init__(self, split: SplitSource, device: int) -> None:
        """Serve device number `device` of the split."""
        self._split = split
        self._device = device

    def read_into(self, span: Span, buffer: memoryview) -> None:
        """Fill `buffer` with the shard at `span` of the device's imagined file. Raises as `SplitSource.read_into`."""
        self._split.read_into(self._device, span, buffer)

    def will_need(self, spans: Sequence[Span]) -> None:
        """Tell the source which shards are read next. This is only a hint, so it raises nothing."""
        self._split.will_need(self._device, spans)
