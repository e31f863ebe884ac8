"""The checks after every step: from outside, and by the tiers' own `check_valid`."""

from __future__ import annotations

import ctypes
import gc
import logging
from contextlib import suppress

from hypothesis.stateful import invariant

from expertier.testing.fake_device import FakeDevice
from expertier.testing.tier_machine.base import PAGE, MachineBase
from expertier.testing.tier_machine.model import EngineCall, Held
from expertier.tiers.model.slot_layout import GUARD_BYTES

MOVES_DOWN_TOO = {"used_bytes", "slots", "rounding_bytes", "compute_bytes", "budget_bytes", "memory_bytes"}


class TierChecks(MachineBase):
    """The invariants, by number; the rules check what a single call promises.

    I1 bytes: `check_bytes`, and the readers that `launch` queues. I2 partition: `check_sizes`, `compute`.
    I3 budget: `check_sizes`, `resize_host_pool`. I4, I5 slots and tables: `TierManager.check_valid`. I6, I7
    pins: `check_pins`, `use_a_dead_lease`, `close_while_in_use`. I8 readiness: the reads at once of leases
    without a stream and of engines. I9 single flight: `check_call`. I10 reuse: queued readers. I11 faults:
    `attempt` and the rules with faults. I12 boundary: the rules that move it. I13 liveness: `acquire` and
    `engine_begins` compare with `fits`. I14 accounting: `check_counters`, `check_call`. I15 teardown.
    """

    @invariant()
    def everything_holds(self) -> None:
        """Check all of it."""
        assert not self.wrong, "; ".join(self.wrong)
        self.tiers.check_valid()
        self.check_pins()
        self.check_bytes()
        self.check_sizes()
        self.check_counters()
        assert not self.wrong, "; ".join(self.wrong)

    def check_bytes(self) -> None:
        """I1: copies in L2 are right at any time, slots and guards once no work is queued."""
        for (layer, expert), address in self.inside.copies():
            offsets = self.table.slot_layouts[layer].block_offsets
            for offset, expected in zip(offsets, self.expected[layer, expert], strict=True):
                found = self.read_host_memory(address + offset, len(expected))
                assert found == expected, f"I1: the copy in L2 of expert {expert} of layer {layer}"
        idle = self.is_idle()
        for layer in range(self.table.n_layers):
            held = [held for held in self.live if held.layer == layer and held.stream is None]
            calls = [call for call in self.engine_calls if call.layer == layer and call.filled]
            if idle:
                self.read_now(self.reads_of(layer, self.inside.residents(layer), "I1: a slot"))
                self.check_guards(layer)
            else:
                users: list[Held | EngineCall] = [*held, *calls]
                for user in users:
                    self.read_now(self.reads_of(layer, user.group, "I6: a slot in use"))
        if self.region.written is not None:
            n_bytes, value = self.region.written
            found = self.read_memory(self.inside.base, n_bytes)
            assert found == bytes([value]) * n_bytes, "I2: other code wrote to the compute region"

    def check_guards(self, layer: int) -> None:
        """The guard after a layer's last slot is zero, because matrix kernels read past the last slot."""
        layout, places = self.table.slot_layouts[layer], self.inside.places(layer)
        ends = [
            place.offset + (self.tiers.slots[layer] - 1) * place.stride + size
            for place, size in zip(places, layout.matrix_bytes, strict=True)
        ]
        for end in ends[-1:] if layout.stride else ends:
            guard = self.read_memory(self.inside.base + end, GUARD_BYTES)
            assert guard == bytes(GUARD_BYTES), f"the guard after the slots of layer {layer} is not zero"

    def check_sizes(self) -> None:
        """I2: the slab is the sum of its parts. I3: pinned bytes are counted, and within the budget."""
        stats = self.tiers.stats()
        l1, l2 = stats.l1, stats.l2
        assert l1.used_bytes + l1.compute_bytes + l1.rounding_bytes == self.inside.slab_bytes, "I2"
        assert self.inside.quotas == self.quotas, "I11: a plan that failed left its quotas"
        assert l1.compute_bytes >= self.region.wanted_bytes, "I2: less than is reserved"
        assert self.inside.slab_bytes <= self.device.device_bytes, "I2: the slab is not in device memory"
        assert self.device.pinned_bytes == l2.used_bytes + l2.bounce_bytes, "I3: pinned bytes"
        assert l2.used_bytes <= self.pool_allowed_bytes, "I3: the pool's budget"
        self.pool_allowed_bytes = max(self.pool_bytes, min(self.pool_allowed_bytes, l2.used_bytes))
        peak = self.watched_device.peak_pinned_bytes - l2.bounce_bytes
        assert max(peak, l2.peak_bytes) <= self.pool_most_bytes, "I3: the pool's budget, at its peak"
        largest = max(layout.block_bytes for layout in self.table.slot_layouts)
        unit = self.device.pinned_allocation_bytes(-(-largest // PAGE) * PAGE)
        assert l2.bounce_bytes == 2 * unit, "I3: the bounce minimum"

    def check_counters(self) -> None:
        """I14: the counters add up, and only grow."""
        stats = self.tiers.stats()
        assert stats.l1.hits + stats.l1.misses == self.requests, "I14: hits and misses are all requests"
        sizes = [layer.expert_bytes for layer in self.table.layers]
        fills = self.inside.fills_by_layer()
        residents = sum(len(self.inside.residents(layer)) for layer in range(len(sizes)))
        filling = sum(len(call.missing) for call in self.engine_calls if not call.filled)
        assert stats.l1.bytes_in == sum(n * size for n, size in zip(fills, sizes, strict=True)), "I14: bytes"
        assert sum(fills) - stats.l1.evictions == residents, (
            f"I14: {sum(fills)} fills, {stats.l1.evictions} evictions, {residents} residents, {filling} filling"
        )
        if self.pool_most_bytes == 0:
            assert stats.l2.hits == stats.l2.misses == stats.l2.bytes_in == 0, "I14: L2 is off"
        assert stats.file.bytes_read == self.watched_source.bytes_read, "I14: bytes read"
        prefetch = stats.prefetch
        ended = prefetch.done + prefetch.dropped + prefetch.failed
        assert prefetch.asked == ended + len(self.waiting), "I14: prefetches"
        now = stats.as_dict()
        for tier, counters in now.items():
            for name, value in counters.items():
                if name not in MOVES_DOWN_TOO:
                    assert value >= self.last[tier][name], f"I14: the counter {tier}.{name} fell"
        self.last = now

    def read_host_memory(self, address: int, n_bytes: int) -> bytes:
        """Return pinned memory, which every device's host can read."""
        return ctypes.string_at(address, n_bytes)

    def teardown(self) -> None:
        """I15: end all use, close, and leave nothing on the device."""
        if hasattr(self, "log_level"):
            logging.getLogger("expertier").setLevel(self.log_level)
        if not hasattr(self, "tiers"):
            return
        failed = bool(self.wrong)
        if self.engine is not None:
            for call in self.engine_calls:
                if call.filled:
                    self.engine.release(call.layer, call.slots)
                else:
                    self.engine.abort(call.layer, call.slots)
            self.engine_calls.clear()
            self.tiers.engine.unbind()
            self.engine = None
        for held in list(self.live):
            held.lease.release()
        self.live.clear()
        try:
            if not failed:
                self.everything_holds()
        except BaseException:
            with suppress(
                Exception
            ):  # what is left on a GPU would change where the next example's memory lies
                self.close_all()
            raise
        self.close_all()
        assert not self.wrong, "; ".join(self.wrong)

    def close_all(self) -> None:
        """Close the tiers twice, then the streams and the device, which raises where memory is left."""
        self.tiers.close()
        self.tiers.close()
        if self.device.has_streams:
            self.device.synchronize()
        self.close_streams()
        if self.fault_plan.injected and isinstance(self.device, FakeDevice) and self.device.n_events:
            gc.collect()  # the tracebacks of injected errors keep frames, and these frames keep fences
        self.device.close()
