"""One source for the slices of several devices: what one of them misses is read once, for all.

    device 0 misses ─► read the whole matrix ─┬─► its slice, where it asked for it
                                              └─► the others' slices ─► kept until they ask
    device 1 misses ─► kept? ─► taken

The devices of a tensor split run the same layers on the same tokens, so that what one misses the other is about to
miss. What is kept is plain memory within a limit; beyond it, the oldest is dropped and read again.
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
from expertier.tiers.split.kept_slices import Bytes, KeptSlices
from expertier.tiers.split.split_table import SliceRef, SplitTable
from expertier.units import MIB

_KEPT_BYTES = 256 * MIB
_KEPT_STEPS = 2
"""Decode steps of one layer whose misses fit into what is kept, however large the experts are."""


@dataclass(frozen=True, slots=True)
class SplitReads:
    """What was read of the files, and how the slices came to their devices.

    `handed_over` slices were read for another device and taken later; `dropped` ones were read in vain. `kept_bytes`
    wait now, `kept_peak_bytes` at most did, of `kept_limit_bytes`.
    """

    file: FileStats
    handed_over: int
    dropped: int
    kept_bytes: int
    kept_peak_bytes: int
    kept_limit_bytes: int


def kept_limit(table: SplitTable) -> int:
    """Return how many bytes of slices may wait: a few hundred MiB, as one device may run ahead of another.

    At least what a few steps of decode can miss: then no step reads anything twice. Never more than there are.
    """
    whole = table.whole
    step = max(layer.top_k * layer.expert_bytes for layer in whole.layers)
    return min(whole.expert_bytes_total, max(_KEPT_BYTES, _KEPT_STEPS * step))


class SplitSource:
    """Whole experts from `source`, in slices for the devices of `table`. Thread-safe."""

    def __init__(self, source: ByteSource, table: SplitTable, *, kept_bytes: int | None = None) -> None:
        """Read nothing yet. `kept_bytes` bounds what waits for other devices (`kept_limit`)."""
        self._source = CountedSource(source)
        self._table = table
        self._changed = threading.Condition()
        self._reading: set[SliceRef] = set()
        self._kept = KeptSlices(kept_limit(table) if kept_bytes is None else kept_bytes)

    def part(self, device: int) -> PartSource:
        """Return the source of one device's slices."""
        return PartSource(self, device)

    def read_into(self, device: int, span: Span, buffer: memoryview) -> None:
        """Fill `buffer` with the device's slice at `span` of its imagined file.

        Raises what the source raises; every device that asks for a part of the same expert meanwhile reads by itself
        then.
        """
        if len(buffer) != span.n_bytes:
            raise ValueError(
                f"asked for {span.n_bytes} bytes into a buffer of {len(buffer)}: they must be equal"
            )
        ref = self._table.find(device, span)
        with self._changed:
            while (ref, device) not in self._kept and ref in self._reading:
                wait_interruptibly(self._changed)
            kept = self._kept.take((ref, device))
            if kept is None:
                self._reading.add(ref)
        target = np.frombuffer(buffer, np.uint8)
        if kept is not None:
            target[:] = kept
            return
        others: dict[int, Bytes] = {}
        try:
            others = self._read(ref, device, target)
        finally:
            with self._changed:
                self._reading.remove(ref)
                for other, slice_ in others.items():
                    self._kept.put((ref, other), slice_)
                self._changed.notify_all()

    def will_need(self, device: int, spans: Sequence[Span]) -> None:
        """Pass on which whole matrices are about to be read."""
        refs = [self._table.find(device, span) for span in spans]
        with self._changed:
            missing = [ref for ref in refs if (ref, device) not in self._kept]
        self._source.will_need([self._whole(ref) for ref in missing])

    def stats(self) -> SplitReads:
        """Return the counts so far."""
        file = self._source.stats()
        with self._changed:
            kept = self._kept
            return SplitReads(file, kept.taken, kept.dropped, kept.n_bytes, kept.peak_bytes, kept.limit_bytes)

    def forget(self) -> None:
        """Drop what waits: the devices start anew."""
        with self._changed:
            self._kept.clear()

    def check_valid(self) -> None:
        """Assert that nothing is read now, and what waits is counted."""
        with self._changed:
            assert not self._reading, f"reads that never ended: {self._reading}"
            self._kept.check_valid()

    def _whole(self, ref: SliceRef) -> Span:
        return self._table.slices[0][ref.matrix].whole.span(ref.expert)

    def _read(self, ref: SliceRef, device: int, target: Bytes) -> dict[int, Bytes]:
        """Read the whole matrix, put the device's slice into `target` and return those of the others."""
        span = self._whole(ref)
        try:
            whole = np.empty(span.n_bytes, np.uint8)
            others = {
                other: np.empty(slices[ref.matrix].matrix.expert_bytes, np.uint8)
                for other, slices in enumerate(self._table.slices)
                if other != device
            }
        except MemoryError as error:
            raise SourceError(
                f"no memory for {2 * span.n_bytes} bytes, one matrix of an expert and its slices; free some"
            ) from error
        self._source.read_into(span, whole.data)
        for number, slices in enumerate(self._table.slices):
            slices[ref.matrix].gather(whole, target if number == device else others[number])
        return others


class PartSource:
    """One device's slices: a `HintedSource` for its `TierManager`."""

    def __init__(self, split: SplitSource, device: int) -> None:
        """Serve device number `device` of the split."""
        self._split = split
        self._device = device

    def read_into(self, span: Span, buffer: memoryview) -> None:
        """Fill `buffer` with the slice at `span`; raises what the source of all devices raises."""
        self._split.read_into(self._device, span, buffer)

    def will_need(self, spans: Sequence[Span]) -> None:
        """Say which slices are read next. A hint: raises nothing."""
        self._split.will_need(self._device, spans)
