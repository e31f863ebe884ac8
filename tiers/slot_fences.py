"""Who must wait for whom on a device that queues its work (I10)."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from expertier.errors import DeviceError
from expertier.hip.device import Device
from expertier.hip.fence import Fence, Fences


@dataclass(slots=True)
class _SlotFences:
    """The last write to a slot, and the last read of it on each stream, as far as they may still be queued."""

    written: Fence | None = None
    reads: dict[int, Fence] = field(default_factory=dict)


class SlotFences:
    """Orders fills and reads of slots that are queued on different streams; never blocks the host unless asked.

        fill on a copy stream     waits for the slot's last write and all its reads
        read on a compute stream  waits for the slot's last write
        a move of the slots       waits for everything, and everything waits for it

    On a device without streams all of it is done at once, and these methods do nothing. Thread-safe.
    """

    def __init__(self, device: Device) -> None:
        """Start with nothing queued."""
        self._device = device
        self._fences = Fences(device)
        self._lock = threading.Lock()
        self._slots: dict[tuple[int, int], _SlotFences] = {}
        self._moved: Fence | None = None

    def before_fill(self, layer: int, slots: Iterable[int], stream: int) -> None:
        """Have `stream` wait until `slots` may be overwritten."""
        if not self._device.has_streams:
            return
        with self._lock:
            pending = dict.fromkeys([self._moved])  # what was queued together has one fence
            for slot in slots:
                known = self._slots.get((layer, slot))
                if known is not None:
                    pending[known.written] = None
                    pending.update((fence, None) for on, fence in known.reads.items() if on != stream)
        for fence in pending:
            if fence is not None and not fence.done():
                fence.hold(stream)

    def after_fill(self, layer: int, slots: Iterable[int], stream: int) -> Fence | None:
        """Note that a fill of `slots` was queued on `stream`, and return its fence; None without streams.

        Where no fence can be made the call waits for the device instead, so that nothing needs one.
        """
        if not self._device.has_streams:
            return None
        fence = self._fence_or_wait(stream)
        with self._lock:
            for slot in slots:
                self._slots[layer, slot] = _SlotFences(written=fence)
        return fence

    def before_read(self, layer: int, slots: Iterable[int], stream: int | None) -> None:
        """Have `stream` wait until the bytes of `slots` are there; the calling thread, where it is None."""
        if not self._device.has_streams:
            return
        with self._lock:
            pending = dict.fromkeys([self._moved])
            for slot in slots:
                known = self._slots.get((layer, slot))
                if known is not None:
                    pending[known.written] = None
        for fence in pending:
            if fence is None:
                continue
            if stream is None:
                fence.wait()
            elif not fence.done():
                fence.hold(stream)

    def after_read(self, layer: int, slots: Sequence[int], stream: int | None) -> None:
        """Note that reads of `slots` may be queued on `stream`; None: the caller has seen them done."""
        if not self._device.has_streams or stream is None or not slots:
            return
        fence = self._fence_or_wait(stream)
        if fence is None:
            return
        with self._lock:
            for slot in slots:
                self._slots.setdefault((layer, slot), _SlotFences()).reads[stream] = fence

    def before_move(self, stream: int) -> None:
        """Have `stream` wait for everything that may still be queued on any slot."""
        with self._lock:
            pending = [self._moved] if self._moved is not None else []
            for known in self._slots.values():
                pending += [known.written] if known.written is not None else []
                pending += known.reads.values()
        for fence in pending:
            if not fence.done():
                fence.hold(stream)

    def after_move(self, stream: int) -> Fence | None:
        """Note that all slots moved on `stream`: everything later waits for that. Return its fence."""
        if not self._device.has_streams:
            return None
        fence = self._fence_or_wait(stream)
        with self._lock:
            self._slots.clear()
            self._moved = fence
        return fence

    def close(self) -> None:
        """Wait for what is queued and give the events back; nobody uses the slots any more."""
        if self._device.has_streams:
            self._device.synchronize()
        with self._lock:
            self._slots.clear()
            self._moved = None
        self._fences.close()

    def _fence_or_wait(self, stream: int) -> Fence | None:
        try:
            return self._fences.after(stream)
        except DeviceError:
            self._device.synchronize()
            return None
        except BaseException:  # an interrupt: nothing may stay queued that nobody waits for
            self._device.synchronize()
            raise
