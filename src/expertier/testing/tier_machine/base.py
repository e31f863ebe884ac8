"""The machine's state, and the steps and checks that all of its rules share."""

from __future__ import annotations

import logging
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize

from expertier.hip.faults.plan import FaultPlan
from expertier.planner.policy.kind import PolicyKind
from expertier.testing.tier_machine.engine_calls import EngineCalls
from expertier.testing.tier_machine.hooks import Read, TierHooks
from expertier.testing.tier_machine.inside import Inside
from expertier.testing.tier_machine.model import (
    ERRORS,
    EngineCall,
    ExpertKey,
    Fault,
    Held,
    Region,
    View,
    slots_of,
)
from expertier.testing.tier_machine.watched import WatchedDevice, WatchedSource
from expertier.tiers.config.config import TierConfig

T = TypeVar("T")

PAGE = 4096
N_LAYERS = 3  # rules draw layer numbers below it; the table may have more or fewer layers, as numbers are taken modulo

layers = st.integers(0, N_LAYERS - 1)
expert_lists = st.lists(st.integers(0, 7), max_size=8)
stream_choices = st.integers(0, 3)


def faults(*operations: str) -> st.SearchStrategy[Fault]:
    """Return faults of these operations; most are the first call, and of the operation's own kind."""
    assert set(operations) <= set(ERRORS)
    return st.builds(
        Fault,
        st.sampled_from(operations),
        st.sampled_from([1, 1, 2, 3, 4, 5, 7]),
        st.sampled_from([None, None, KeyboardInterrupt, MemoryError]),
    )


class MachineBase(RuleBasedStateMachine, TierHooks):
    """One manager, used by one thread, by an engine, and by kernels that are still queued."""

    leases: Bundle[Held] = Bundle("leases")
    dead: Bundle[Held] = Bundle("dead")
    calls: Bundle[EngineCall] = Bundle("calls")

    @initialize(
        n_slots=st.integers(1, 5),
        spare_bytes=st.sampled_from([0, 128, 4000, 9000, 30000]),
        pool_pages=st.sampled_from([40, 8, 5, 3, 2, 1, 0]),
        policy=st.sampled_from(list(PolicyKind)),
    )
    def start(self, n_slots: int, spare_bytes: int, pool_pages: int, policy: PolicyKind) -> None:
        """Make the tiers."""
        logger = logging.getLogger("expertier")
        self.log_level = logger.level
        logger.setLevel(logging.ERROR)  # thousands of faults would each be logged; until teardown
        self.table = self.make_table()
        self.source = self.make_source()
        self.fault_plan = FaultPlan()
        self.device = self.make_device()
        self.streams = self.make_streams()
        self.watched_device = WatchedDevice(self.device, self.fault_plan)
        self.watched_source = WatchedSource(self.source, self.fault_plan)
        self.pool_bytes = self.pool_allowed_bytes = self.pool_most_bytes = pool_pages * PAGE
        demands = self.table.layer_demands()
        budget = spare_bytes + sum(demand.bytes_for(min(n_slots, demand.n_experts)) for demand in demands)
        config = TierConfig(
            expert_cache_bytes=budget, host_pool_bytes=self.pool_bytes, policy=policy, fill_threads=0
        )
        self.tiers = self.make_tiers(self.table, self.watched_device, self.watched_source, config)
        self.inside = Inside(self.tiers)
        self.quotas = self.tiers.slots
        self.live: list[Held] = []
        self.engine: EngineCalls | None = None
        self.engine_calls: list[EngineCall] = []
        self.region = Region()
        self.waiting: dict[tuple[ExpertKey, str], None] = {}
        self.fills_pool = False
        self.filling_may_have_stopped = False
        self.speculative: set[ExpertKey] = set()
        self.useful_bytes = self.wasted_bytes = 0
        self.requests = 0
        self.wrong: list[str] = []
        self.last: dict[str, dict[str, int]] = self.tiers.stats().as_dict()
        self.expected = {
            (layer, expert): [self.source.expected(span) for span in self.table.span(layer, expert)]
            for layer in range(self.table.n_layers)
            for expert in range(self.table.layers[layer].n_experts)
        }
        self.key_at = {span.offset: key for key in self.expected for span in self.table.span(*key)}

    # ---- choices

    def some_layer(self, number: int) -> int:
        """Return a layer of the table."""
        return number % self.table.n_layers

    def some_experts(self, layer: int, numbers: Iterable[int]) -> list[int]:
        """Return experts that the layer has."""
        return [number % self.table.layers[layer].n_experts for number in numbers]

    def some_stream(self, number: int) -> int | None:
        """Return a compute stream, or None."""
        choices = (None, *self.streams, *self.streams)
        return choices[number % len(choices)]

    # ---- what follows from the machine's state

    @property
    def bound(self) -> bool:
        """Whether an engine is bound."""
        return self.engine is not None

    @property
    def in_use(self) -> bool:
        """Whether slots must stay where they are."""
        return bool(self.live) or self.bound

    def pins(self, layer: int) -> Counter[int]:
        """Return how many users hold each slot."""
        users: list[Held | EngineCall] = [*self.live, *self.engine_calls]
        return Counter(slot for user in users if user.layer == layer for slot in user.group.values())

    def filling(self, layer: int) -> set[int]:
        """Return the experts that the engine is filling: a call for one would wait."""
        calls = [call for call in self.engine_calls if call.layer == layer and not call.filled]
        return {int(call.experts[index]) for call in calls for index in call.missing}

    def fits(self, layer: int, wanted: set[int], without: Held | None = None) -> bool:
        """Whether enough slots are unpinned for all of `wanted` at once (I13)."""
        pins = self.pins(layer)
        if without is not None:
            pins.subtract(without.group.values())
        residents = self.inside.residents(layer)
        taken = {slot for slot, n in pins.items() if n > 0}
        taken |= {slot for expert, slot in residents.items() if expert in wanted}
        return len(wanted - set(residents)) <= self.tiers.slots[layer] - len(taken)

    def must_not_wait(self, without: Held | None = None) -> bool:
        """Whether a call that finds no slot is refused, because this thread holds slots and must not wait."""
        return any(held.group for held in self.live if held is not without)

    def missed_bytes(self) -> int:
        """Return the bytes of all misses of L1."""
        misses = self.inside.misses_by_layer()
        return sum(n * layer.expert_bytes for n, layer in zip(misses, self.table.layers, strict=True))

    def compute_bytes(self) -> int:
        """Return the bytes below the boundary."""
        return self.tiers.stats().l1.compute_bytes

    # ---- steps

    def attempt(
        self, call: Callable[[], T], fault: Fault | None, *, swallows: Iterable[str] = ()
    ) -> tuple[bool, T | None]:
        """Run a call with a fault armed: (True, its result), or (False, None) when it failed for that reason.

        An error that was not injected is raised. An injected fault that led to no error must be of one of the
        operations in `swallows`, which the tiers can do without.
        """
        if fault is not None:
            self.fault_plan.arm(fault.operation, fault.nth, fault.error)
        before = sum(self.fault_plan.injected.values())
        try:
            result = call()
        except BaseException as error:
            if fault is None or not isinstance(error, fault.raises):
                raise
            assert "injected fault" in str(error), f"{error!r} was not injected"  # noqa: PT017
            traceback.clear_frames(error.__traceback__)  # they keep fences, and so events of the device
            return False, None
        finally:
            self.fault_plan.disarm()
            injected = sum(self.fault_plan.injected.values()) - before
        assert not injected or (fault is not None and fault.operation in swallows), (
            f"I11: {fault} occurred, and no error was raised for it"
        )
        return True, result

    def expect(self, error: type[Exception], call: Callable[[], object]) -> None:
        """Check that a call is refused with this error, and changes nothing."""
        before = self.inside.view()
        try:
            call()
        except error:
            assert self.inside.view() == before, "a refusal changed something"
            return
        raise AssertionError(f"no {error.__name__} was raised")

    def finish(self, stream: int | None) -> None:
        """Wait for the work that is queued on a stream."""
        if stream is not None:
            event = self.device.create_event()
            self.device.record_event(event, stream)
            self.device.wait_event(event)
            self.device.destroy_event(event)

    def seen(self, read: Read, found: bytes) -> None:
        """Note the bytes that a reader found; the next check reports wrong bytes. It may run inside the tiers."""
        if found != read.expected:
            at = next(
                i for i, pair in enumerate(zip(found, read.expected, strict=True)) if pair[0] != pair[1]
            )
            self.wrong.append(f"{read.what}: wrong from byte {at} of {len(found)}")

    def reads_of(self, layer: int, group: dict[int, int], what: str) -> list[Read]:
        """Return the bytes that readers of a group must find, matrix by matrix."""
        reads = []
        for number, place in enumerate(self.inside.places(layer)):
            for expert, slot in group.items():
                address = self.inside.base + place.offset + slot * place.stride
                expected = self.expected[layer, expert][number]
                reads.append(
                    Read(address, expected, f"{what}: expert {expert} of layer {layer} in slot {slot}")
                )
        return reads

    def read_now(self, reads: Iterable[Read]) -> None:
        """Check bytes that must be in place by now."""
        for read in reads:
            self.seen(read, self.read_memory(read.address, len(read.expected)))

    # ---- what a call must keep, and what holds after it

    def check_pins(self) -> None:
        """I6: a held expert keeps its slot. I7: pins are the users."""
        for layer, n_slots in enumerate(self.tiers.slots):
            expected = self.pins(layer)
            found = self.inside.pins(layer)
            assert found == [expected[slot] for slot in range(n_slots)], f"I7: pins of layer {layer}: {found}"
        for held in self.live:
            residents = self.inside.residents(held.layer)
            assert slots_of(held.lease.held) == held.group, "I6: the group changed"
            for expert, slot in held.group.items():
                assert residents.get(expert) == slot, f"I6: leased expert {expert} left slot {slot}"

    def check_call(
        self,
        before: View,
        fetched: set[ExpertKey],
        asked: set[ExpertKey],
        *,
        used: set[ExpertKey] | None = None,
        moved: bool = False,
        ok: bool = True,
        unsure: Iterable[ExpertKey] = (),
    ) -> View:
        """Check what a call did beside its purpose, and return a view of the tiers after it.

        `fetched` are the experts that the call may have brought from L2 or the source, `asked` the experts that it
        looked up, and `used` the experts whose copies in L2 became the youngest: by default those that were fetched and
        those that left L1. `moved` says that the boundary moved before experts were looked up. `ok` says that the call
        did not fail: then all of `fetched` came, except perhaps the experts in `unsure`.
        """
        after = self.inside.view()
        gone = before.gone_until(after)
        if used is None:
            used = fetched | gone
        self.check_order_of_use(before, after, used, unsure=set(unsure) if ok else fetched | set(unsure))
        self._check_reads(fetched)
        self._check_speculation(before, after, asked, moved=moved)
        return after

    def check_order_of_use(
        self, before: View, after: View, used: set[ExpertKey], unsure: Iterable[ExpertKey] = ()
    ) -> None:
        """L2's order of use: fills and evictions from L1 are uses, hits in L1 are not; `unsure` is not checked."""
        left_out = set(unsure)
        now = [key for key in after.copies if key not in left_out]
        unused = [key for key in before.copies if key not in used | left_out and key in now]
        assert now[: len(unused)] == unused, (
            f"L2's order of use was {before.copies}; with {sorted(used)} used it is {after.copies}"
        )

    def _check_reads(self, fetched: set[ExpertKey]) -> None:
        """I9: only missing experts are read, and no expert is read twice."""
        spans = Counter(self.watched_source.take_reads())
        read = {self.key_at[span.offset] for span in spans}
        assert read <= fetched, f"I9: {read - fetched} were read, and were not missing"
        twice = {self.key_at[span.offset] for span, n in spans.items() if n > 1}
        assert not twice, f"I9: {twice} were read twice"

    def _check_speculation(self, before: View, after: View, asked: set[ExpertKey], *, moved: bool) -> None:
        """Prefetched experts that no call asked for leave first, and their bytes are counted once (I14)."""
        bytes_of = [layer.expert_bytes for layer in self.table.layers]
        gone = before.gone_until(after)
        stayed = self.speculative - asked - gone
        for layer in () if moved else range(self.table.n_layers):
            pinned = self.pins(layer)
            idle = {key for key in stayed if key[0] == layer and not pinned[after.residents[layer][key[1]]]}
            used = {key for key in gone - self.speculative if key[0] == layer}
            assert not idle or not used, f"{used} were evicted, and {idle}, which no call asked for, stayed"
        useful = after.stats.prefetch.useful_bytes - before.stats.prefetch.useful_bytes
        wasted = after.stats.prefetch.wasted_bytes - before.stats.prefetch.wasted_bytes
        ended = self.speculative - stayed
        expected_useful = sum(bytes_of[layer] for layer, _ in ended & asked)
        expected_wasted = sum(bytes_of[layer] for layer, _ in ended - asked)
        if moved:  # the move may have evicted some of them before they were asked for
            assert useful + wasted == expected_useful + expected_wasted, "I14: useful and wasted bytes"
        else:
            assert (useful, wasted) == (expected_useful, expected_wasted), (
                f"I14: {useful} useful and {wasted} wasted bytes, not {expected_useful} and {expected_wasted}"
            )
        self.speculative = stayed
