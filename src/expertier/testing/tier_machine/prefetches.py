"""Rules: prefetches and fillings of the host pool, which wait until they are drained."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from expertier.testing.tier_machine.base import PAGE, MachineBase, expert_lists, faults, layers
from expertier.testing.tier_machine.model import ERRORS, ExpertKey, Fault, View


class PrefetchRules(MachineBase):
    """Rules that ask for prefetches, fill the host pool, cancel and drain."""

    @rule(number=layers, numbers=expert_lists, into=st.sampled_from(["l1", "l1", "l2"]))
    def prefetch(self, number: int, numbers: list[int], into: str) -> None:
        """Ask for experts; experts that are resident, or that were asked for already, are not asked for again."""
        layer = self.some_layer(number)
        experts = self.some_experts(layer, numbers)
        before = self.inside.view()
        self.tiers.prefetch(layer, experts, into=into)
        n_waiting = len(self.waiting)
        for expert in experts:
            there = expert in before.residents[layer] or expert in self.filling(layer)
            if not there and not (into == "l2" and (layer, expert) in before.copies):
                self.waiting[(layer, expert), into] = None
        asked = self.tiers.stats().prefetch.asked - before.stats.prefetch.asked
        assert asked == len(self.waiting) - n_waiting, f"{asked} prefetches noted of {experts}"

    @precondition(lambda self: self.waiting)
    @rule(number=st.none() | layers)
    def cancel_prefetches(self, number: int | None) -> None:
        """Cancel the waiting prefetches of one layer, or of all layers."""
        layer = None if number is None else self.some_layer(number)
        remaining = {label: None for label in self.waiting if layer is not None and label[0][0] != layer}
        n_cancelled = self.tiers.cancel_prefetches(layer)
        assert n_cancelled == len(self.waiting) - len(remaining), f"cancelled {n_cancelled} of {self.waiting}"
        self.waiting = remaining

    @rule()
    def fill_host_pool(self) -> None:
        """Have the next drain fill the free room of L2."""
        self.tiers.fill_host_pool()
        self.fills_pool, self.filling_may_have_stopped = True, False

    @precondition(lambda self: self.waiting or self.fills_pool)
    @rule(fault=st.none() | faults(*ERRORS))
    def drain(self, fault: Fault | None) -> None:
        """Run the waiting prefetches; of their failures only an interrupt is raised."""
        l2 = self.tiers.stats().l2
        is_filling = self.fills_pool and not self.waiting and l2.used_bytes <= l2.budget_bytes
        before, fills = self.inside.view(), self.inside.fills_by_layer()
        ok, _ = self.attempt(self.tiers.drain, fault, swallows=ERRORS)
        self.filling_may_have_stopped |= (
            fault is not None
        )  # an error ends the filling until it is asked for again
        after = self.inside.view()
        was, now = before.stats.prefetch, after.stats.prefetch
        n_ended = now.done + now.dropped + now.failed - was.done - was.dropped - was.failed
        ended = list(self.waiting)[:n_ended]
        self.waiting = dict.fromkeys(list(self.waiting)[n_ended:])
        if ok:
            assert not self.waiting, f"{self.waiting} still wait after a drain"
        else:
            assert fault is not None
            assert fault.error is KeyboardInterrupt, "a prefetch raised"
        fetched = {key for key, _ in ended}
        if self.fills_pool:
            fetched |= set(self.expected) - set(before.copies)
        if is_filling:
            self._check_filling(before, after, ok=ok and not self.filling_may_have_stopped)
        read = {self.key_at[span.offset] for span in self.watched_source.take_reads()}
        assert read <= fetched, f"I9: {read - fetched} were read, and no prefetch asked for them"
        self.check_order_of_use(before, after, before.gone_until(after), unsure=fetched)
        new_fills = [n - m for n, m in zip(self.inside.fills_by_layer(), fills, strict=True)]
        self._note_speculation(before, after, {key for key, into in ended if into == "l1"}, new_fills)

    def _check_filling(self, before: View, after: View, *, ok: bool) -> None:
        """A filling alone evicts nothing from slots or L2, and reads all experts where L2 has room for all."""
        was, now = before.stats, after.stats
        assert now.l2.evictions == was.l2.evictions, "a copy was evicted for an expert that no call asked for"
        assert set(before.copies) <= set(after.copies), "a copy left for an expert that no call asked for"
        assert (before.residents, before.ranks) == (after.residents, after.ranks), "the slots changed"
        assert (now.l2.hits, now.l2.misses) == (was.l2.hits, was.l2.misses), "nobody asked L2"
        n_came = len(after.copies) - len(before.copies)
        assert now.l2.ahead_fills - was.l2.ahead_fills == n_came, f"I14: {n_came} experts were read ahead"
        assert now.l2.bytes_in - was.l2.bytes_in == now.l2.ahead_bytes - was.l2.ahead_bytes, "I14: bytes"
        layouts = self.table.slot_layouts
        takes = sum(
            self.device.pinned_allocation_bytes(-(-layouts[layer].block_bytes // PAGE) * PAGE)
            for layer, _ in self.expected
        )
        if ok and self.pool_bytes >= takes:
            fully_resident = {
                layer for layer, n in enumerate(self.tiers.slots) if n >= self.table.layers[layer].n_experts
            }
            away = set(self.expected) - set(after.copies)
            away -= {(layer, expert) for layer in fully_resident for expert in after.residents[layer]}
            assert not away, f"{away} are neither in slots nor in L2, and L2 has room for all experts"

    def _note_speculation(
        self, before: View, after: View, fetched: set[ExpertKey], new_fills: list[int]
    ) -> None:
        """Note the experts in L1 that no call has asked for; the bytes of such experts that left are wasted."""
        gone = before.gone_until(after)
        came = set()
        for layer, expert in fetched:
            if expert in after.residents[layer]:
                was_there = expert in before.residents[layer]  # it may have left and come back
                if not was_there or after.ranks[layer][expert] != before.ranks[layer][expert]:
                    came.add((layer, expert))
        now = (self.speculative - gone) | came
        wasted = 0
        for layer, n_filled in enumerate(new_fills):
            ended = sum(key[0] == layer for key in self.speculative) + n_filled
            wasted += (ended - sum(key[0] == layer for key in now)) * self.table.layers[layer].expert_bytes
        prefetch, earlier = after.stats.prefetch, before.stats.prefetch
        assert prefetch.useful_bytes == earlier.useful_bytes, "I14: no call asked for an expert"
        assert prefetch.wasted_bytes - earlier.wasted_bytes == wasted, (
            f"I14: {prefetch.wasted_bytes - earlier.wasted_bytes} bytes counted as wasted, not {wasted}"
        )
        self.speculative = now
