"""Makes fills, reads and moves of slots wait for each other on a device that queues its work (I10)."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from expertier.errors import DeviceError
from expertier.hip.device import Device
from expertier.hip.fence import Fence, Fences

_Slot: TypeAlias = tuple[int, int]
"""(layer, slot)"""


class SlotFences:
    """Orders fills and reads of slots that are queued on different streams.

        fill on a copy stream     waits for the slot's last write and all its reads
        read on a compute stream  waits for the slot's last write
        a move of the slots       waits for everything, and everything waits for it

    Streams wait, and not the host, unless a method's docstring says otherwise. On a device without streams all work is
    done at once, and these methods do nothing. Thread-safe.
    """

    def __init__(self, device: Device) -> None:
        """Start with nothing queued."""
        self._device = device
        self._fences = Fences(device)
        self._lock = threading.Lock()
        # The last write to each slot and the last read of it on each stream, where they may still be queued.
        self._written: dict[_Slot, Fence | None] = {}
        self._reads: dict[_Slot, dict[int, Fence]] = {}
        self._moved: Fence | None = None

    def before_fill(self, layer: int, slots: Iterable[int], stream: int) -> None:
        """Have `stream` wait until `slots` may be overwritten."""
        if not self._device.has_streams:
            return
        with self._lock:
            pending = dict.fromkeys([self._moved])  # an ordered set, as slots filled together share a fence
            for slot in slots:
                pending[self._written.get((layer, slot))] = None
                reads = self._reads.get((layer, slot))
                if reads:
                    pending.update((fence, None) for on, fence in reads.items() if on != stream)
        for fence in pending:
            if fence is not None and not fence.done():
                fence.make_wait(stream)

    def after_fill(self, layer: int, slots: Iterable[int], stream: int) -> Fence | None:
        """Note that a fill of `slots` was queued on `stream`, and return its fence; None on a device without streams.

        Where the driver cannot make a fence, the call waits for the device and returns None: the fill is then done.
        """
        if not self._device.has_streams:
            return None
        fence = self._fence_or_wait(stream)
        with self._lock:
            for slot in slots:
                self._written[layer, slot] = fence
                self._reads.pop((layer, slot), None)
        return fence

    def before_read(self, layer: int, slots: Iterable[int], stream: int | None) -> None:
        """Have `stream` wait until the bytes of `slots` are there; where it is None, the calling thread waits."""
        if not self._device.has_streams:
            return
        with self._lock:
            pending = dict.fromkeys([self._moved])
            for slot in slots:
                pending[self._written.get((layer, slot))] = None
        for fence in pending:
            if fence is None:
                continue
            if stream is None:
                fence.wait()
            elif not fence.done():
                fence.make_wait(stream)

    def after_read(self, layer: int, slots: Sequence[int], stream: int | None) -> None:
        """Note that reads of `slots` may be queued on `stream`; None: the caller knows that the reads are done."""
        if not self._device.has_streams or stream is None or not slots:
            return
        fence = self._fence_or_wait(stream)
        if fence is None:
            return
        with self._lock:
            for slot in slots:
                self._reads.setdefault((layer, slot), {})[stream] = fence

    def before_move(self, stream: int) -> None:
        """Have `stream` wait for everything that may still be queued on any slot."""
        with self._lock:
            pending = dict.fromkeys([self._moved, *self._written.values()])
            for reads in self._reads.values():
                pending.update(dict.fromkeys(reads.values()))
        for fence in pending:
            if fence is not None and not fence.done():
                fence.make_wait(stream)

    def after_move(self, stream: int) -> Fence | None:
        """Note that a move of the slots was queued on `stream`, for which all later work waits; return its fence.

        Returns None where nothing has to wait, as `after_fill` does.
        """
        if not self._device.has_streams:
            return None
        fence = self._fence_or_wait(stream)
        with self._lock:
            self._forget()
            self._moved = fence
        return fence

    def close(self) -> None:
        """Wait for all queued work and give the events back. The slots must not be used any more."""
        if self._device.has_streams:
            self._device.synchronize()
        with self._lock:
            self._forget()
            self._moved = None
        self._fences.close()

    def _forget(self) -> None:
        self._written.clear()
        self._reads.clear()

    def _fence_or_wait(self, stream: int) -> Fence | None:
        try:
            return self._fences.after(stream)
        except DeviceError:
            self._device.synchronize()
            return None
        except BaseException:  # an interrupt: without a fence, nothing would wait for the queued work
            self._device.synchronize()
            raise
