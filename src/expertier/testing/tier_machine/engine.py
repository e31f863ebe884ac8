"""Rules: an engine that is bound to the tiers."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import MultipleResults, consumes, multiple, precondition, rule

from expertier.errors import BusyError
from expertier.testing.tier_machine.base import MachineBase, faults, layers
from expertier.testing.tier_machine.leases import EVENTS, fill_faults
from expertier.testing.tier_machine.model import EngineCall, Fault


class EngineRules(MachineBase):
    """Rules that bind, begin, fill, complete or abort, release and unbind."""

    @precondition(lambda self: not self.bound)
    @rule(fault=st.none() | faults("zero", *EVENTS))
    def bind(self, fault: Fault | None) -> None:
        """Bind an engine; on a device with memory of its own, whole layers are prefetched for it."""
        if self.attempt(self.tiers.engine.bind, fault, swallows=EVENTS)[0]:
            self.engine = self.open_engine(self.tiers)
            if self.device.has_own_memory:
                for number, layer in enumerate(self.table.layers):
                    if self.tiers.slots[number] == layer.n_experts:
                        there = self.inside.residents(number)
                        missing = [expert for expert in range(layer.n_experts) if expert not in there]
                        self.waiting |= {((number, expert), "l1"): None for expert in missing}

    @precondition(lambda self: self.bound)
    @rule(now=st.sampled_from([False, False, False, True]))
    def unbind(self, now: bool) -> None:
        """Unbind the engine where `now` says so, so that it makes some calls first; refused while it holds slots."""
        if self.engine_calls:
            self.expect(BusyError, self.tiers.engine.unbind)
        elif now:
            self.tiers.engine.unbind()
            self.engine = None

    @precondition(lambda self: self.bound)
    @rule(
        target=MachineBase.calls,
        number=layers,
        numbers=st.sets(st.integers(0, 7), min_size=1, max_size=5),
        known=st.booleans(),
    )
    def engine_begins(
        self, number: int, numbers: set[int], known: bool
    ) -> EngineCall | MultipleResults[EngineCall]:
        """Have the engine look experts up: resident experts where `known` says so, or any experts."""
        assert self.engine is not None
        layer = self.some_layer(number)
        wanted = set(self.some_experts(layer, numbers))
        if known:
            wanted = (
                (wanted & set(self.inside.residents(layer))) or set(self.inside.residents(layer)) or wanted
            )
        fits = (
            len(wanted) <= self.tiers.slots[layer]
            and not wanted & self.filling(layer)
            and self.fits(layer, wanted)
        )
        before = self.inside.view()
        chosen = np.array(sorted(wanted), np.int32)
        begun = self.engine.begin(layer, chosen)
        assert (begun is not None) == fits, "I13: the tables and the model disagree on what fits"
        if begun is None:
            return multiple()
        slots, missing = begun
        call = EngineCall(layer, chosen, slots, missing, filled=not len(missing))
        assert {int(chosen[i]) for i in missing} == wanted - set(before.residents[layer]), "I14: misses"
        self.requests += len(wanted)
        self.engine_calls.append(call)
        after = self.check_call(before, set(), {(layer, expert) for expert in wanted}, used=set())
        call.evicted = before.gone_until(after)
        if call.filled:
            self._read(call, "I8: an engine's hit")
        return call

    @rule(call=MachineBase.calls, fault=st.none() | fill_faults)
    def engine_fills(self, call: EngineCall, fault: Fault | None) -> None:
        """Have the engine's misses filled, or the call undone."""
        if call not in self.engine_calls or call.filled:
            return
        assert self.engine is not None
        before = self.inside.view()
        engine, layer = self.engine, call.layer
        experts = call.experts[call.missing]
        ok, _ = self.attempt(
            lambda: engine.fill(layer, experts, call.slots[call.missing]), fault, swallows=EVENTS
        )
        if ok:
            assert engine.complete(layer, call.slots) == len(call.missing), (
                "I8: not all missing slots were completed"
            )
            call.filled = True
            self._read(call, "I8: an engine's misses")
        else:
            assert self.tiers.engine.last_error is not None, "an engine's failed fill left no error"
            engine.abort(layer, call.slots)
            self.engine_calls.remove(call)
        fetched = {(layer, expert) for expert in experts.tolist()}
        self.check_call(before, fetched, set(), used=fetched | call.evicted, ok=ok)

    @precondition(lambda self: self.bound)
    @rule(number=layers, slot=st.integers(0, 9), expert=st.integers(0, 7))
    def engine_fills_what_nobody_chose(self, number: int, slot: int, expert: int) -> None:
        """I8: a fill of a slot that is not being filled with this expert is refused."""
        layer = self.some_layer(number)
        expert = self.some_experts(layer, [expert])[0]
        calls = [call for call in self.engine_calls if call.layer == layer and not call.filled]
        if not any(call.group.get(expert) == slot for call in calls):
            self.expect(ValueError, lambda: self.tiers.engine.fill(layer, [expert], [slot]))

    @rule(call=consumes(MachineBase.calls))
    def engine_ends(self, call: EngineCall) -> None:
        """Have the engine release a call's slots, after it has read them."""
        if call not in self.engine_calls:
            return
        if not call.filled:
            self.engine_fills(call, None)
        assert self.engine is not None
        self._read(call, "I6: at the end of an engine's call")
        self.engine.release(call.layer, call.slots)
        self.engine_calls.remove(call)

    def _read(self, call: EngineCall, what: str) -> None:
        self.read_now(self.reads_of(call.layer, call.group, what))

    @precondition(lambda self: self.in_use)
    @rule()
    def all_leave(self) -> None:
        """End all leases and calls of the engine, so that slots may move."""
        for call in list(self.engine_calls):
            self.engine_ends(call)
        if self.engine is not None:
            self.tiers.engine.unbind()
            self.engine = None
        for held in list(self.live):
            held.lease.release()
        self.live.clear()
