"""The tiers under random use and faults: leases, parts, an engine, plans, and calls that fail at their N-th step.

The model knows only what a user knows: which experts each lease holds in which slots. After every step all bytes in
L1 and L2 are compared with the file, pins with the leases, sizes with the budgets and counters with the requests.
"""

from __future__ import annotations

import ctypes
import faulthandler
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

import expertier as et
from expertier.errors import BudgetError, BusyError, DeviceError, LeaseError, SourceError
from expertier.hip.fault_plan import FaultPlan
from expertier.hip.faults import FaultyDevice
from expertier.hip.host import HostDevice
from expertier.planner import PolicyKind
from expertier.planner.allocate import LayerPlan
from expertier.tiers.faulty_source import FaultySource
from expertier.tiers.lease import Lease, Part
from expertier.tiers.slot_layout import GUARD_BYTES
from gguf_files import Block, BytesSource, ModelFile, write_model

I32 = npt.NDArray[np.int32]
PAGE = 4096
HANG_S = 120
ERRORS: dict[str, type[Exception]] = {
    "read": SourceError,
    "copy_in": DeviceError,
    "alloc_pinned": DeviceError,
}

Fault = tuple[str, int, type[BaseException] | None]

layers = st.integers(0, 1)
experts = st.lists(st.integers(0, 7), min_size=1, max_size=8)
faults = st.tuples(
    st.sampled_from(sorted(ERRORS)),
    st.sampled_from([1, 1, 2, 3, 4, 5, 7]),
    st.sampled_from([None, KeyboardInterrupt]),
)


@cache
def model_file() -> ModelFile:
    """Two layers: slots in one piece, and arrays of an expert that takes two pages."""
    with tempfile.TemporaryDirectory() as folder:
        return write_model(Path(folder) / "m.gguf", [Block(), Block(types=("Q4_0", "Q4_0", "Q8_0"))])


@dataclass(eq=False)
class Held:
    """What the model knows of a lease: the part that it holds now, as experts and slots."""

    lease: Lease
    wanted: set[int]
    part: dict[int, int]


@dataclass(eq=False)
class EngineCall:
    """What the model knows of an engine's call: its slots, and whether its misses are still to be filled."""

    layer: int
    experts: I32
    slots: I32
    missing: I32
    filled: bool = False


class TierMachine(RuleBasedStateMachine):
    """One manager, used by one thread and by an engine."""

    leases = Bundle("leases")
    dead = Bundle("dead")
    calls = Bundle("calls")

    @initialize(
        n_slots=st.integers(1, 5),
        pool_pages=st.sampled_from([30, 5, 3, 2, 1, 0]),
        policy=st.sampled_from(list(PolicyKind)),
    )
    def start(self, n_slots: int, pool_pages: int, policy: PolicyKind) -> None:
        faulthandler.dump_traceback_later(HANG_S, exit=True)  # a lost slot or block shows as a wait for ever
        self.model = model_file()
        self.faults = FaultPlan()
        self.host = HostDevice()
        self.pool_bytes = pool_pages * PAGE
        budget = sum(demand.bytes_for(n_slots) for demand in self.model.table.layer_demands())
        self.tiers = et.TierManager(
            self.model.table,
            device=FaultyDevice(self.host, self.faults),
            config=et.TierConfig(
                expert_cache_bytes=budget, host_pool_bytes=self.pool_bytes, policy=policy, fill_threads=0
            ),
            source=FaultySource(BytesSource(self.model.bytes), self.faults),
        )
        self.live: list[Held] = []
        self.engine_calls: list[EngineCall] = []
        self.bound = False
        self.requests = 0
        self.last: dict[str, dict[str, int]] = self.tiers.stats().as_dict()

    # ---- what the model derives

    def pins(self, layer: int) -> dict[int, int]:
        """Slot → how many users hold it."""
        pins: dict[int, int] = {}
        for held in self.live:
            if held.lease.layer == layer:
                for slot in held.part.values():
                    pins[slot] = pins.get(slot, 0) + 1
        for call in self.engine_calls:
            if call.layer == layer:
                for slot in call.slots.tolist():
                    pins[slot] = pins.get(slot, 0) + 1
        return pins

    def filling(self, layer: int) -> set[int]:
        """Experts that the engine is filling: a call for one would wait."""
        calls = [call for call in self.engine_calls if call.layer == layer and not call.filled]
        return {int(call.experts[index]) for call in calls for index in call.missing}

    def fits(self, layer: int, wanted: set[int], without: Held | None = None) -> bool:
        """Whether enough slots are unpinned for all of `wanted` at once."""
        before = without.part if without is not None else {}
        if without is not None:
            without.part = {}
        try:
            residents = self.tiers._residency.residents(layer)
            taken = set(self.pins(layer)) | {slot for expert, slot in residents.items() if expert in wanted}
            missing = wanted - set(residents)
            return len(missing) <= self.tiers.slots[layer] - len(taken)
        finally:
            if without is not None:
                without.part = before

    def would_wait(self, without: Held | None = None) -> bool:
        """Whether a refused call waits: nobody else will ever release anything here."""
        return not any(held.part for held in self.live if held is not without)

    def attempt(self, call: Callable[[], Part | None], fault: Fault | None) -> Part | None:
        """Run a call with a fault armed; None when it failed for that reason, with its fault seen to be the cause."""
        expected: type[BaseException] = KeyError
        if fault is not None:
            operation, nth, error = fault
            expected = error or ERRORS[operation]
            self.faults.arm(operation, nth, error)
        injected = sum(self.faults.injected.values())
        try:
            return call()
        except expected:
            assert sum(self.faults.injected.values()) == injected + 1, "an error that nobody injected"
            return None
        finally:
            self.faults.disarm()

    def count(self, layer: int, wanted: set[int], before: et.TierStats, done: bool) -> None:
        """Note a part's look-ups: they count from `begin` on, also when the fill fails after it."""
        after = self.tiers.stats()
        asked = after.l1.hits + after.l1.misses - before.l1.hits - before.l1.misses
        assert asked == len(wanted) or (asked == 0 and not done), (
            f"{asked} look-ups for {wanted} of layer {layer}"
        )
        self.requests += asked

    # ---- leases

    @rule(target=leases, layer=layers, wanted=experts)
    def acquire(self, layer: int, wanted: list[int]) -> Held | MultipleResults:
        return self.try_to_acquire(layer, wanted, None)

    @rule(target=leases, layer=layers, wanted=experts, fault=faults)
    def acquire_with_a_fault(self, layer: int, wanted: list[int], fault: Fault) -> Held | MultipleResults:
        return self.try_to_acquire(layer, wanted, fault)

    def try_to_acquire(self, layer: int, wanted: list[int], fault: Fault | None) -> Held | MultipleResults:
        distinct = list(dict.fromkeys(wanted))
        n_slots = self.tiers.slots[layer]
        if len(distinct) > n_slots:
            residents = set(self.tiers._residency.residents(layer)) | self.filling(layer)
            distinct.sort(key=lambda expert: expert not in residents)
        first = set(distinct[:n_slots])
        if first & self.filling(layer):
            return multiple()
        fits = self.fits(layer, first)
        if not fits and self.would_wait():
            return multiple()
        before = self.tiers.stats()
        residents_before = self.tiers._residency.residents(layer)
        taken: list[Lease] = []

        def call() -> Part | None:
            taken.append(self.tiers.acquire(layer, wanted))
            return taken[0].held

        if not fits:
            with pytest.raises(BusyError):
                call()
            assert self.tiers.stats() == before, "a refusal changed something"
            assert self.tiers._residency.residents(layer) == residents_before
            return multiple()
        part = self.attempt(call, fault)
        self.count(layer, first, before, done=bool(taken))
        if not taken:
            assert not set(self.tiers._residency.residents(layer)) - set(residents_before), (
                "a failed fill stayed"
            )
            return multiple()
        held = Held(taken[0], set(distinct), slots_of(part))
        assert set(held.part) == first
        assert self.tiers.stats().l1.hits - before.l1.hits == len(first & set(residents_before))
        self.live.append(held)
        return held

    @rule(held=leases, number=st.integers(0, 7), fault=st.none() | faults)
    def take_a_part(self, held: Held, number: int, fault: Fault | None) -> None:
        if held not in self.live or not held.lease.n_parts:
            return
        number %= held.lease.n_parts
        layer = held.lease.layer
        wanted = set(held.lease._groups[number].tolist())
        if set(held.part) == wanted:
            assert held.lease._take(number) is held.lease.held
            return
        if wanted & self.filling(layer):
            return
        fits = self.fits(layer, wanted, without=held)
        if not fits and self.would_wait(without=held):
            return
        before = self.tiers.stats()
        held.part = {}
        if not fits:
            with pytest.raises(BusyError):
                held.lease._take(number)
            return
        part = self.attempt(lambda: held.lease._take(number), fault)
        self.count(layer, wanted, before, done=part is not None)
        held.part = slots_of(part)
        assert set(held.part) == (wanted if part is not None else set())

    @rule(target=dead, held=consumes(leases))
    def release(self, held: Held) -> Held:
        if held in self.live:
            held.lease.release()
            self.live.remove(held)
        return held

    @precondition(lambda self: len(self.live) > 2)
    @rule()
    def release_all(self) -> None:
        for held in list(self.live):
            held.lease.release()
        self.live.clear()

    @rule(held=dead)
    def use_a_dead_lease(self, held: Held) -> None:
        for call in (
            held.lease.release,
            lambda: held.lease.view("up"),
            lambda: list(held.lease.parts) or held.lease.view("up"),
        ):
            with pytest.raises(LeaseError):
                call()

    # ---- the engine

    @precondition(lambda self: not self.bound)
    @rule()
    def bind(self) -> None:
        self.tiers.bind_engine()
        self.bound = True

    @precondition(lambda self: self.bound)
    @rule()
    def unbind(self) -> None:
        if self.engine_calls:
            with pytest.raises(BusyError, match="still holds"):
                self.tiers.unbind_engine()
        else:
            self.tiers.unbind_engine()
            self.bound = False

    @precondition(lambda self: self.bound)
    @rule(target=calls, layer=layers, wanted=st.sets(st.integers(0, 7), min_size=1, max_size=5))
    def engine_begins(self, layer: int, wanted: set[int]) -> EngineCall | MultipleResults:
        chosen = np.array(sorted(wanted), np.int32)
        slots, miss_index = np.full(len(chosen), -1, np.int32), np.zeros(len(chosen), np.int32)
        fits = (
            self.fits(layer, wanted)
            and not wanted & self.filling(layer)
            and len(wanted) <= self.tiers.slots[layer]
        )
        with self.tiers._locks.held(layer):
            misses = self.tiers._residency.begin(layer, chosen, slots, miss_index)
        assert (misses >= 0) == fits, "the policy and the model disagree on what fits"
        if misses < 0:
            return multiple()
        self.requests += len(chosen)
        call = EngineCall(layer, chosen, slots, miss_index[:misses].copy(), filled=misses == 0)
        self.engine_calls.append(call)
        return call

    @rule(call=calls, fault=st.none() | faults)
    def engine_fills(self, call: EngineCall, fault: Fault | None) -> None:
        if call not in self.engine_calls or call.filled:
            return
        done: list[bool] = []

        def fill() -> None:
            self.tiers.fill(call.layer, call.experts[call.missing], call.slots[call.missing])
            done.append(True)

        self.attempt(fill, fault)
        residency = self.tiers._residency
        with self.tiers._locks.held(call.layer):
            if done:
                assert residency.complete(call.layer, call.slots) == len(call.missing)
                call.filled = True
            else:
                assert self.tiers.last_error is not None
                assert residency.abort(call.layer, call.slots) == 0
                self.engine_calls.remove(call)
            self.tiers._locks.notify_all(call.layer)

    @rule(call=consumes(calls))
    def engine_ends(self, call: EngineCall) -> None:
        if call not in self.engine_calls:
            return
        if not call.filled:
            self.engine_fills(call, None)
        with self.tiers._locks.held(call.layer):
            assert self.tiers._residency.release(call.layer, call.slots) == 0
        self.engine_calls.remove(call)

    # ---- the whole

    @rule(wanted=st.none() | st.tuples(st.integers(1, 8), st.integers(1, 8)), fails=st.booleans())
    def apply(self, wanted: tuple[int, int] | None, fails: bool) -> None:
        before, slots_before = self.tiers.stats(), self.tiers.slots
        slots = wanted if wanted is not None else slots_before
        residents = sum(len(self.tiers._residency.residents(layer)) for layer in range(2))
        needed = sum(
            layout.range_bytes(n) for layout, n in zip(self.model.table.slot_layouts, slots, strict=True)
        )
        plan = LayerPlan(slots, needed, needed)
        if self.live or self.bound:
            with pytest.raises(BusyError):
                self.tiers.apply(plan)
            assert self.tiers.stats() == before
        elif needed > self.tiers._slab.n_bytes:
            with pytest.raises(BudgetError):
                self.tiers.apply(plan)
            assert self.tiers.stats() == before
        elif fails:
            self.faults.arm("zero", 1)
            with pytest.raises(DeviceError):
                self.tiers.apply(plan)
            assert self.tiers.slots == slots_before
        else:
            self.tiers.apply(plan)
            assert self.tiers.slots == slots
            left = sum(len(self.tiers._residency.residents(layer)) for layer in range(2))
            assert self.tiers.stats().l1.evictions == before.l1.evictions + residents - left

    @precondition(lambda self: self.live or self.bound)
    @rule()
    def close_while_in_use(self) -> None:
        with pytest.raises(BusyError):
            self.tiers.close()

    # ---- after every step

    @invariant()
    def everything_holds(self) -> None:
        self.tiers.check_valid()
        self.check_pins()
        self.check_bytes()
        self.check_sizes()
        self.check_counters()

    def check_pins(self) -> None:
        for layer in range(2):
            expected = self.pins(layer)
            found = self.tiers._residency.pins_of(layer)
            assert found == [expected.get(slot, 0) for slot in range(self.tiers.slots[layer])], "I7"
        for held in self.live:
            residents = self.tiers._residency.residents(held.lease.layer)
            assert slots_of(held.lease.held) == held.part, "I6: the part changed"
            for expert, slot in held.part.items():
                assert residents.get(expert) == slot, "I6: a leased expert moved"

    def check_bytes(self) -> None:
        table, slab = self.model.table, self.tiers._slab
        for layer in range(2):
            matrices, places = table.layers[layer].matrices, slab.places(layer)
            for expert, slot in self.tiers._residency.residents(layer).items():
                for matrix, place, expected in zip(
                    matrices, places, self.model.matrix_bytes(layer, expert), strict=True
                ):
                    address = slab.base + place.offset + slot * place.stride
                    assert ctypes.string_at(address, matrix.expert_bytes) == expected, "I1, I8: bytes in L1"
        for (layer, expert), address in self.tiers._pool.copies():
            offsets = table.slot_layouts[layer].block_offsets
            for offset, expected in zip(offsets, self.model.matrix_bytes(layer, expert), strict=True):
                assert ctypes.string_at(address + offset, len(expected)) == expected, "I1, I8: bytes in L2"
        for layer in range(2):
            layout, places = table.slot_layouts[layer], slab.places(layer)
            ends = [
                place.offset + (self.tiers.slots[layer] - 1) * place.stride + size
                for place, size in zip(places, layout.matrix_bytes, strict=True)
            ]
            for end in ends[-1:] if layout.stride else ends:
                guard = ctypes.string_at(slab.base + end, GUARD_BYTES)
                assert guard == bytes(GUARD_BYTES), "the guard after the last slot is not zero"

    def check_sizes(self) -> None:
        stats = self.tiers.stats()
        assert self.host.pinned_bytes == stats.l2.used_bytes + stats.l2.bounce_bytes, "I3: pinned bytes"
        assert stats.l2.used_bytes <= stats.l2.peak_bytes <= self.pool_bytes, "I3: the pool's budget"
        assert stats.l2.bounce_bytes == 2 * 2 * PAGE
        assert stats.l1.used_bytes <= self.tiers._slab.n_bytes <= self.host.device_bytes, "I2"

    def check_counters(self) -> None:
        stats = self.tiers.stats()
        assert stats.l1.hits + stats.l1.misses == self.requests, "I14: hits and misses are all requests"
        sizes = [layer.expert_bytes for layer in self.model.table.layers]
        fills = self.tiers._residency.fills_by_layer()
        residents = sum(len(self.tiers._residency.residents(layer)) for layer in range(2))
        assert stats.l1.bytes_in == sum(n * size for n, size in zip(fills, sizes, strict=True)), "I14"
        assert sum(fills) - stats.l1.evictions == residents, "I14: fills - evictions = resident"
        if self.pool_bytes == 0:
            assert stats.l2.hits == stats.l2.misses == stats.l2.bytes_in == 0
        now = stats.as_dict()
        for tier, counters in now.items():
            for name, value in counters.items():
                if name not in ("used_bytes", "slots", "rounding_bytes", "compute_bytes"):
                    assert value >= self.last[tier][name], f"I14: {tier}.{name} went back"
        self.last = now

    def teardown(self) -> None:
        if not hasattr(self, "tiers"):
            return
        note(f"live leases at the end: {len(self.live)}")
        for call in list(self.engine_calls):
            self.engine_ends(call)
        if self.bound:
            self.tiers.unbind_engine()
        if self.live:
            with pytest.raises(BusyError):
                self.tiers.close()
        for held in list(self.live):
            held.lease.release()
        self.live.clear()
        self.everything_holds()
        self.tiers.close()
        faulthandler.cancel_dump_traceback_later()
        self.host.close()  # I15: complains about any byte that is left


def slots_of(part: Part | None) -> dict[int, int]:
    """Expert → slot."""
    if part is None:
        return {}
    return dict(zip(part.experts.tolist(), part.slots.tolist(), strict=True))


TestTierMachine = TierMachine.TestCase
TestTierMachine.settings = settings(
    stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
