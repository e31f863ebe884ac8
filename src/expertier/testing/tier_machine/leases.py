"""Rules: leases, their groups, and kernels that read them."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import MultipleResults, consumes, multiple, precondition, rule

from expertier.errors import BusyError, LeaseError
from expertier.testing.tier_machine.base import (
    MachineBase,
    expert_lists,
    faults,
    layers,
    stream_choices,
)
from expertier.testing.tier_machine.model import ExpertKey, Fault, Held, View, slots_of
from expertier.tiers.access.lease import Lease

EVENTS = ("create_event", "record_event")  # when these fail, the tiers wait for the device instead
MOVES = ("copy_within", "zero", "stream_wait_event")  # when these fail, a move is put off
fill_faults = faults("read", "verify", "copy_in", "alloc_pinned", "stream_wait_event", "zero", *EVENTS)


class LeaseRules(MachineBase):
    """Acquire, take groups, read, release, and misuse."""

    @rule(
        target=MachineBase.leases,
        number=layers,
        numbers=expert_lists,
        stream=stream_choices,
        fault=st.none() | fill_faults,
    )
    def acquire(
        self, number: int, numbers: list[int], stream: int, fault: Fault | None
    ) -> Held | MultipleResults[Held]:
        """Acquire experts, perhaps while a call fails."""
        return self._acquire(self.some_layer(number), numbers, self.some_stream(stream), fault)

    def _acquire(
        self, layer: int, numbers: list[int], stream: int | None, fault: Fault | None
    ) -> Held | MultipleResults[Held]:
        wanted = self.some_experts(layer, numbers)
        distinct = list(dict.fromkeys(wanted))
        moves = self.moves_by_itself()
        before = self.inside.view()
        first = self._first_part(layer, distinct)
        if not moves:
            if first & self.filling(layer):
                return multiple()  # the call would wait for the engine, which is this same thread
            if not self.fits(layer, first):
                if self.must_not_wait() and not self.filling(layer):
                    self.expect(BusyError, lambda: self.tiers.acquire(layer, wanted, stream))
                return multiple()
        taken: list[Lease] = []
        ok, _ = self.attempt(
            lambda: taken.append(self.tiers.acquire(layer, wanted, stream)), fault, swallows=(*EVENTS, *MOVES)
        )
        if ok and moves:
            first = set(slots_of(taken[0].held))
            assert len(first) == min(len(distinct), self.tiers.slots[layer]), (
                "I13: the group has the wrong size"
            )
        if moves:
            self.note_own_move(before, certain=fault is None)
        else:
            assert self.tiers.slots == before.slots, "the boundary moved, though the move did not pay"
        asked = self._count(layer, first, before, ok=ok)
        missed = asked if moves else {key for key in asked if key[1] not in before.residents[layer]}
        if (
            moves and not ok
        ):  # the move may have been interrupted before it touched the copies in L2 of the experts that it dropped
            missed |= before.gone_until(self.inside.view())
        # Where the call moved the boundary, it may have hit an expert that was resident before, or missed it because
        # the move had dropped it.
        stayed = {(layer, expert) for expert in before.residents[layer]} & asked if moves else set()
        after = self.check_call(before, missed, asked, moved=moves, ok=ok, unsure=stayed)
        if not ok:
            new = set(after.residents[layer]) - set(before.residents[layer])
            # A wait that could not be queued may fail the call after all is filled; then the experts stay.
            late = fault is not None and fault.operation in (
                "stream_wait_event",
                "record_event",
                "create_event",
            )
            assert not new or (late and new == first - set(before.residents[layer])), f"I11: {new} were left"
            return multiple()
        held = Held(taken[0], set(distinct), stream, slots_of(taken[0].held))
        assert set(held.group) == first, "the lease holds other experts than the first group's"
        if not moves:
            hits = after.stats.l1.hits - before.stats.l1.hits
            assert hits == len(first & set(before.residents[layer])), (
                "I14: the hits are not the resident experts"
            )
        self.live.append(held)
        self._read_now(held)
        return held

    @rule(held=MachineBase.leases, number=st.integers(0, 7), fault=st.none() | fill_faults)
    def take_a_part(self, held: Held, number: int, fault: Fault | None) -> None:
        """Have a lease take another group, which may be an earlier one."""
        if held not in self.live or not held.lease.n_groups:
            return
        number %= held.lease.n_groups
        layer, wanted = held.layer, set(held.lease._groups[number].tolist())
        if set(held.group) == wanted:
            assert held.lease._take(number) is held.lease.held, "the same group again, and not the same"
            return
        if wanted & self.filling(layer):
            return
        before = self.inside.view()
        if not self.fits(layer, wanted, without=held):
            if not self.must_not_wait(without=held) or self.filling(layer):
                return
            held.group = {}
            try:
                held.lease._take(number)
            except BusyError:
                return
            raise AssertionError("I13: no slots, and no BusyError")
        was = held.group
        ok, _ = self.attempt(lambda: held.lease._take(number), fault, swallows=EVENTS)
        held.group = slots_of(held.lease.held)
        assert set(held.group) == wanted if ok else held.group in ({}, was), "I11: half of a group"
        asked = self._count(layer, wanted, before, ok=ok)
        missed = {key for key in asked if key[1] not in before.residents[layer]}
        self.check_call(before, missed, asked, ok=ok)
        self._read_now(held)

    def _first_part(self, layer: int, distinct: list[int]) -> set[int]:
        """Return the experts of the first group: when not all experts fit, resident experts come first."""
        n_slots = self.tiers.slots[layer]
        if len(distinct) > n_slots:
            there = set(self.inside.residents(layer)) | self.filling(layer)
            distinct = sorted(distinct, key=lambda expert: expert not in there)
        return set(distinct[:n_slots])

    def _count(self, layer: int, wanted: set[int], before: View, *, ok: bool) -> set[ExpertKey]:
        """Note a group's look-ups (I14), which count even where the fill fails after them; return their experts."""
        stats = self.tiers.stats()
        n_asked = stats.l1.hits + stats.l1.misses - before.stats.l1.hits - before.stats.l1.misses
        self.requests += n_asked
        if not ok and n_asked == 0:
            return set()
        if not ok and n_asked != len(
            wanted
        ):  # the call failed after a move that changed the layer's number of slots
            return {(layer, expert) for expert in range(self.table.layers[layer].n_experts)}
        assert n_asked == len(wanted), f"I14: {n_asked} look-ups for {wanted} of layer {layer}"
        return {(layer, expert) for expert in wanted}

    # ---- readers

    def _read_now(self, held: Held) -> None:
        """I8: without a stream the bytes are in place when the call returns."""
        if held.stream is None:
            self.read_now(self.reads_of(held.layer, held.group, "I8: a lease without a stream"))

    @rule(held=MachineBase.leases)
    def launch(self, held: Held) -> None:
        """Queue a kernel that reads a lease's experts when it runs."""
        if held in self.live:
            reads = self.reads_of(held.layer, held.group, "I1, I10: a queued reader")
            self.launch_read(held.stream, reads, self.seen)

    @precondition(lambda self: self.all_streams())
    @rule(which=st.integers(0, 6), n=st.sampled_from([1, 1, 2, 5, 30]))
    def advance_a_stream(self, which: int, n: int) -> None:
        """Let one of the streams, the tiers' own included, run some of its work; or let all streams finish."""
        streams = self.all_streams()
        if which < 6:
            self.advance(streams[which % len(streams)], n)
        else:
            self.device.synchronize()

    # ---- ends

    @rule(
        target=MachineBase.dead,
        held=consumes(MachineBase.leases),
        reads=st.booleans(),
        fault=st.none() | faults(*EVENTS),
    )
    def release(self, held: Held, reads: bool, fault: Fault | None) -> Held:
        """Release a lease whose readers may still have to run; where that fails, the lease is as before.

        An interrupt does not make it fail: the interrupt is raised after the lease has ended.
        """
        if held in self.live:
            if reads:
                self.launch(held)
            ok, _ = self.attempt(held.lease.release, fault, swallows=EVENTS)
            ended = ok or (fault is not None and fault.error is KeyboardInterrupt)
            assert held.lease.released == ended, "I11: half released"
            if not ended:
                self.check_pins()
                held.lease.release()
            self.live.remove(held)
        return held

    @rule(wanted=st.lists(st.integers(0, 7), min_size=8, max_size=8, unique=True), stream=stream_choices)
    def use_all_slots(self, wanted: list[int], stream: int) -> None:
        """Use every layer's slots, as some steps of a model do, so that a move has something to move."""
        if self.in_use:
            return
        on = self.some_stream(stream)
        for layer in range(self.table.n_layers):
            held = self._acquire(layer, wanted, on, None)
            assert isinstance(held, Held), "I13: nobody is in the way"
            self.launch(held)
            held.lease.release()
            self.live.remove(held)

    @rule(held=MachineBase.dead)
    def misuse(self, held: Held) -> None:
        """I7: a lease ends once, and tiers in use cannot be closed."""
        for call in (held.lease.release, lambda: held.lease.view("up"), held.lease.__enter__):
            self.expect(LeaseError, call)
        if held.lease.n_groups:
            self.expect(LeaseError, lambda: next(iter(held.lease.groups)))
        if self.in_use:
            self.expect(BusyError, self.tiers.close)

    # ---- for other rules

    def moves_by_itself(self) -> bool:
        """Whether the next `acquire` moves the boundary down, because that pays and no use of slots prevents it."""
        raise NotImplementedError

    def note_own_move(self, before: View, *, certain: bool) -> None:
        """Check a move that `acquire` made."""
        raise NotImplementedError
