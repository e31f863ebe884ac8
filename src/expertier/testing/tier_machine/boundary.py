"""Rules: the boundary between computing and slots, plans, and the host pool's size."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from expertier.errors import BudgetError, BusyError
from expertier.planner.budget.allocate import LayerPlan, floor_bytes
from expertier.planner.budget.shrink import shrink
from expertier.testing.tier_machine.base import PAGE, MachineBase, faults, stream_choices
from expertier.testing.tier_machine.hooks import Read
from expertier.testing.tier_machine.leases import EVENTS
from expertier.testing.tier_machine.model import Fault, View
from expertier.tiers.model.slot_layout import GUARD_BYTES, RANGE_ALIGNMENT
from expertier.units import round_up

move_faults = faults("copy_within", "zero", "stream_wait_event", *EVENTS)


class BoundaryRules(MachineBase):
    """Rules that reserve, write, release, lower, apply and resize (I2, I12)."""

    @rule(
        eighths=st.sampled_from([1, 1, 2, 3, 4, 6, 8, 9, 0]),
        odd=st.sampled_from([0, 1, 77]),
        stream=stream_choices,
        writes=st.booleans(),
        fault=st.none() | move_faults,
    )
    def reserve_compute(self, eighths: int, odd: int, stream: int, writes: bool, fault: Fault | None) -> None:
        """Reserve a share of the bytes that can be reserved, or a little too many, and perhaps write there."""
        most = self.inside.slab_bytes - floor_bytes(self.table.layer_demands())
        n_bytes = most * eighths // 8 + odd
        on = self.some_stream(stream)
        before, was, wanted = self.inside.view(), self.compute_bytes(), self.region.wanted_bytes
        if n_bytes > most or (
            n_bytes > was and not self.in_use and round_up(n_bytes, RANGE_ALIGNMENT) > most
        ):
            self.expect(BudgetError, lambda: self.tiers.reserve_compute(n_bytes, stream=on))
            return
        if n_bytes > was and self.in_use:
            self.expect(BusyError, lambda: self.tiers.reserve_compute(n_bytes, stream=on))
            return
        swallows = (*EVENTS, "stream_wait_event")
        ok, region = self.attempt(
            lambda: self.tiers.reserve_compute(n_bytes, stream=on), fault, swallows=swallows
        )
        self._check_move(before, fault, ok=ok)
        now = self.compute_bytes()
        if not ok:
            if now != was:
                self.region.pays_at = self._gain_pays_at()
            elif n_bytes <= was:  # the call was interrupted after it had reserved the bytes
                self._note_wanted(n_bytes)
            self._release(wanted)
            return
        assert region is not None
        assert region.address == self.inside.base, "D4: the compute region's address changed"
        assert region.n_bytes == now >= n_bytes, "less than was asked for"
        assert now == was or now == round_up(n_bytes, RANGE_ALIGNMENT), "the size is not the one asked for"
        self._note_wanted(n_bytes)
        if n_bytes:
            self.region.writable[on] = max(self.region.writable.get(on, 0), n_bytes)
            if writes:
                self.compute(stream)

    @rule(eighths=st.sampled_from([0, 0, 0, 1, 4, 8]))
    def release_compute(self, eighths: int) -> None:
        """Give some of the region back, after the writes that use it are done; nothing moves yet."""
        self._release(self.region.wanted_bytes * eighths // 8)

    def _note_wanted(self, n_bytes: int) -> None:
        self.region.wanted_bytes = max(self.region.wanted_bytes, n_bytes)
        self.region.pays_at = self._gain_pays_at()

    def _release(self, n_bytes: int) -> None:
        for stream in self.region.writers:
            self.finish(stream)
        self.region.writers.clear()
        before = self.inside.view()
        self.tiers.release_compute(n_bytes)
        assert self.inside.view() == before, "a release moved something"
        if n_bytes >= self.region.wanted_bytes:
            return
        self.region.wanted_bytes = n_bytes
        self.region.writable = {stream: min(n, n_bytes) for stream, n in self.region.writable.items()}
        if self.region.written is not None:
            self.region.written = (min(self.region.written[0], n_bytes), self.region.written[1])
        if self.region.pays_at is None:
            self.region.pays_at = self._gain_pays_at()

    @rule(fault=st.none() | move_faults)
    def lower_boundary(self, fault: Fault | None) -> None:
        """Move the boundary down now."""
        before, was = self.inside.view(), self.compute_bytes()
        gain = was - round_up(self.region.wanted_bytes, RANGE_ALIGNMENT)
        if self.in_use and gain:
            self.expect(BusyError, self.tiers.lower_boundary)
            return
        ok, moved = self.attempt(self.tiers.lower_boundary, fault, swallows=(*EVENTS, "stream_wait_event"))
        self._check_move(before, fault, ok=ok)
        if ok:
            assert moved == (gain > 0), "lower_boundary returned the wrong answer"
            assert self.compute_bytes() == round_up(self.region.wanted_bytes, RANGE_ALIGNMENT)
        if ok or self.compute_bytes() != was:
            self.region.pays_at = self._gain_pays_at() if moved or not ok else self.region.pays_at

    @precondition(lambda self: any(self.region.writable.values()))
    @rule(stream=stream_choices)
    def compute(self, stream: int) -> None:
        """Queue a kernel that writes to the whole region, and a kernel that reads what the first one wrote."""
        on = self.some_stream(stream)
        n_bytes = max(self.region.writable.get(on, 0), self.region.writable.get(None, 0))
        if not n_bytes:
            return
        for other in self.region.writers - {on}:
            self.finish(other)
        self.region.writers = {on}
        self.region.n_writes += 1
        self.region.written = None
        number, value = self.region.n_writes, self.region.n_writes % 255 + 1
        self.launch_write(on, self.inside.base, n_bytes, value)

        def seen(read: Read, found: bytes) -> None:
            self.seen(read, found)
            if self.region.n_writes == number:
                self.region.written = (min(n_bytes, self.region.wanted_bytes), value)

        read = Read(self.inside.base, bytes([value]) * n_bytes, "I2: the compute region, after a write")
        self.launch_read(on, [read], seen)

    @rule(
        wanted=st.none() | st.lists(st.integers(1, 8), min_size=8, max_size=8),
        fitting=st.sampled_from([True, True, False]),
        fault=st.none() | move_faults,
    )
    def apply(self, wanted: list[int] | None, fitting: bool, fault: Fault | None) -> None:
        """Apply a plan: the present quotas, or other quotas, which may be too large."""
        before = self.inside.view()
        slots = self.quotas
        if wanted is not None:
            n_experts = [layer.n_experts for layer in self.table.layers]
            slots = tuple(min(n, most) for n, most in zip(wanted, n_experts, strict=False))
            if fitting:
                slots = shrink(slots, self.table.layer_demands(), budget_bytes=self.inside.slab_bytes).slots
        plan = self._plan(slots)
        if plan.used_bytes > self.inside.slab_bytes:
            self.expect(BudgetError, lambda: self.tiers.apply(plan))
            return
        if self.in_use:
            self.expect(BusyError, lambda: self.tiers.apply(plan))
            return
        compute, quotas = self.compute_bytes(), self.quotas
        self.quotas = slots
        ok, _ = self.attempt(lambda: self.tiers.apply(plan), fault, swallows=(*EVENTS, "stream_wait_event"))
        assert self.compute_bytes() == compute, "a plan moved the boundary"
        interrupted = not ok and fault is not None and fault.error is not None
        if interrupted:  # the plan was applied either completely or not at all
            self.tiers.apply(plan)
            ok = True
        if not ok:
            self.quotas = quotas
        self._check_move(before, fault, ok=ok, lossy=interrupted)
        if ok:
            self.region.pays_at = self._gain_pays_at()

    @rule(pages=st.sampled_from([0, 1, 2, 3, 5, 9, 40]))
    def resize_host_pool(self, pages: int) -> None:
        """Give L2 another budget (I3)."""
        self.pool_bytes = pages * PAGE
        was_idle = self.is_idle()  # asked before the call, during which a device may finish its queues
        self.tiers.resize_host_pool(self.pool_bytes)
        self.pool_allowed_bytes = max(self.pool_bytes, self.tiers.stats().l2.used_bytes)
        self.pool_most_bytes = max(self.pool_most_bytes, self.pool_bytes)
        if was_idle:
            assert self.pool_allowed_bytes == self.pool_bytes, "I3: unused bytes were not given back"

    # ---- what holds after a move

    def _check_move(self, before: View, fault: Fault | None, *, ok: bool, lossy: bool = False) -> None:
        """I12: a move happens completely or not at all; the hottest experts stay, as many as fit.

        Capacity comes back when the boundary goes down. `lossy` says that an interrupted move came before this move,
        and may have lost experts.
        """
        after = self.inside.view()
        compute_before, compute = before.stats.l1.compute_bytes, after.stats.l1.compute_bytes
        moved = (before.slots, compute_before) != (after.slots, compute)
        if not ok:
            assert fault is not None
            assert not moved or fault.error is not None, (
                f"I12: the move failed with {fault}, and the slots moved"
            )
        if not moved and not ok:
            for layer, residents in enumerate(after.residents):
                assert residents.items() <= before.residents[layer].items(), "I12: someone moved or came"
            self.check_call(before, set(), set(), moved=True)
            return
        self.check_slots()
        self.region.n_moves += moved
        if moved and self.region.n_moves % 2:  # every other move is left queued
            self.device.synchronize()
            self._check_free_heads()
        for layer, n_slots in enumerate(after.slots):
            ranks = before.ranks[layer]
            hottest = sorted(ranks, key=lambda expert: -ranks[expert])[:n_slots]
            left = set(after.residents[layer])
            assert left == set(hottest) or (lossy and left <= set(ranks)), (
                f"D4: of {ranks} the {n_slots} hottest stay, not {sorted(after.residents[layer])}"
            )
        certain = (
            ok and not lossy
        )  # after an interrupt, the evicted experts may or may not have been touched in L2
        self.check_call(before, set() if certain else before.gone_until(after), set(), moved=True, ok=certain)

    def check_slots(self) -> None:
        """I12, I13: with nothing reserved every layer has as many slots as its quota, otherwise at most as many."""
        slots, compute = self.tiers.slots, self.compute_bytes()
        fits = self._plan(self.quotas).used_bytes + compute <= self.inside.slab_bytes
        assert slots == self.quotas or not fits, f"I12: there are {slots} slots, and {self.quotas} would fit"
        assert all(1 <= n <= quota for n, quota in zip(slots, self.quotas, strict=True)), "I13: quotas"
        assert self._plan(slots).used_bytes + compute <= self.inside.slab_bytes, "I2: too much for the slab"

    def moves_by_itself(self) -> bool:
        """Whether the next `acquire` moves the boundary down."""
        pays_at = self.region.pays_at
        return (
            pays_at is not None
            and round_up(self.region.wanted_bytes, RANGE_ALIGNMENT) < self.compute_bytes()
            and self.missed_bytes() >= pays_at
            and not self.in_use
        )

    def note_own_move(self, before: View, *, certain: bool) -> None:
        """Check the move that `acquire` had reason to make; with a fault the move may have been put off."""
        compute = self.compute_bytes()
        if compute == round_up(self.region.wanted_bytes, RANGE_ALIGNMENT):
            self.region.pays_at = self._gain_pays_at()
            self.check_slots()
        else:
            assert not certain, "the boundary did not move, though the move would have paid"
            assert compute == before.stats.l1.compute_bytes, "I12: half a move"
            assert self.tiers.slots == before.slots, "I12: half a move"

    def _gain_pays_at(self) -> int | None:
        """Return how many bytes must be missed, from now on, until a move down pays: as many as it gains."""
        gained = self.compute_bytes() - round_up(self.region.wanted_bytes, RANGE_ALIGNMENT)
        return self.missed_bytes() + gained if gained > 0 else None

    def _plan(self, slots: tuple[int, ...]) -> LayerPlan:
        sizes = [layout.range_bytes(n) for layout, n in zip(self.table.slot_layouts, slots, strict=True)]
        return LayerPlan(slots, sum(sizes), sum(sizes))

    def _check_free_heads(self) -> None:
        """After a finished move, an expert is followed by another expert of its layer, or by zeros."""
        for layer, n_slots in enumerate(self.tiers.slots):
            taken = set(self.inside.residents(layer).values())
            places = self.inside.places(layer)
            layout = self.table.slot_layouts[layer]
            for place in places[:1] if layout.stride else places:
                for slot in set(range(n_slots)) - taken:
                    at = self.inside.base + place.offset + slot * place.stride
                    read = Read(at, bytes(GUARD_BYTES), f"the head of free slot {slot} of layer {layer}")
                    self.seen(read, self.read_memory(at, GUARD_BYTES))
