"""Host pools under random use: sizes that compete, pools that share a budget, faults, queued copies, pressure.

The model knows when each expert was last used in each pool, which fills are open and which copies are queued. The
device keeps its own books, and checks the budget at every allocation.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
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

from expertier.errors import DeviceError
from expertier.tiers.host_pool.acquired_copies import AcquiredCopies
from expertier.tiers.host_pool.bounce_blocks import N_BOUNCE_BLOCKS
from expertier.tiers.host_pool.budget import HostBudget
from expertier.tiers.host_pool.fill_handle import FillHandle, FreeRoom
from expertier.tiers.host_pool.pool import HostPool
from expertier.tiers.host_pool.pressure import INTERVAL_S, MemoryPressure
from failures.pool_fakes import PAGE, LedgerDevice, ManualFence, powers_of_two, whole_pages

SIZES = (3000, 2 * PAGE, 5 * PAGE - 7)  # of the experts of each layer
N_EXPERTS = 6
FLOOR = 8 * PAGE

keys = st.tuples(st.integers(0, len(SIZES) - 1), st.integers(0, N_EXPERTS - 1))
budgets = st.integers(0, 60).map(lambda pages: pages * PAGE)
faults = st.tuples(st.sampled_from([1, 1, 2, 3]), st.sampled_from([None, KeyboardInterrupt]))


@dataclass(eq=False)
class Fill:
    """An open fill, and whether it has made its block's bytes complete."""

    pool: int
    handle: FillHandle
    address: int
    complete: bool


@dataclass(eq=False)
class Batch:
    """Copies of a layer's experts that were acquired together."""

    pool: int
    layer: int
    copies: AcquiredCopies
    experts: list[int]
    addresses: list[int]


@dataclass(eq=False)
class Known:
    """What the model knows of a pool: its budget, and when each expert with a copy was used last."""

    pool: HostPool
    budget_bytes: int
    used_at: dict[tuple[int, int], int] = field(default_factory=dict)
    fills: list[Fill] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)

    def address_of(self, key: tuple[int, int]) -> int:
        return dict(self.pool.copies()).get(key, 0)


class HostPoolMachine(RuleBasedStateMachine):
    """One or two pools, used by one thread."""

    fills = Bundle("fills")
    batches = Bundle("batches")

    @initialize(
        n_pools=st.integers(1, 2),
        pages=st.lists(st.sampled_from([0, 1, 4, 9, 20, 60]), min_size=2, max_size=2),
        limit=st.none() | budgets,
        power=st.booleans(),
        knows_experts=st.booleans(),
    )
    def start(
        self, n_pools: int, pages: list[int], limit: int | None, power: bool, knows_experts: bool
    ) -> None:
        self.now_s = 0.0
        self.uses = 0
        self.available = 100 * FLOOR
        pressure = MemoryPressure(FLOOR, available_bytes=lambda: self.available, clock=lambda: self.now_s)
        self.limit = limit
        self.budget = HostBudget(limit, pressure=pressure)
        self.device = LedgerDevice(powers_of_two if power else whole_pages)
        self.knows_experts = knows_experts
        self.all_experts_bytes = N_EXPERTS * sum(self.device.rounding(whole_pages(size)) for size in SIZES)
        self.beginning: Known | None = None
        self.known: list[Known] = []
        for number in range(n_pools):
            pool = HostPool(
                self.device,
                budget_bytes=pages[number] * PAGE,
                largest_block_bytes=max(SIZES),
                experts_by_size=dict.fromkeys(SIZES, N_EXPERTS) if knows_experts else None,
                budget=self.budget,
                clock=lambda: self.now_s,
            )
            self.known.append(Known(pool, pages[number] * PAGE))
            self.device.pools.append(pool)
        self.device.after_alloc = self.check_budget
        self.last: list[dict[str, int]] = [{} for _ in self.known]

    # ---- fills

    def _arm(self, fault: tuple[int, type[BaseException] | None] | None) -> type[BaseException]:
        """Have an allocation fail; returns what that raises."""
        if fault is None:
            return KeyError
        nth, error = fault
        self.device.faults.arm("alloc_pinned", nth, error)
        return error or DeviceError

    @rule(target=fills, number=st.integers(0, 1), key=keys, fault=st.none() | faults)
    def begin_fill(
        self, number: int, key: tuple[int, int], fault: tuple[int, type[BaseException] | None] | None
    ) -> Fill | MultipleResults:
        known = self.known[number % len(self.known)]
        if any(
            fill.handle.key == key and not fill.complete and not fill.handle.bounce for fill in known.fills
        ):
            return multiple()  # would wait for ourselves
        if sum(fill.handle.bounce for fill in known.fills) == N_BOUNCE_BLOCKS:
            return multiple()  # might
        there = {at for at, _ in known.pool.copies()}
        assert known.pool.contains(key) == (key in there)
        handle = FillHandle(key, SIZES[key[0]], SIZES[key[0]])
        expected = self._arm(fault)
        self.beginning = known
        try:
            known.pool.begin_fill(handle)
        except expected:
            known.pool.end_fill(handle)
            assert handle.block is None
            return multiple()
        finally:
            self.beginning = None
            self.device.faults.disarm()
        assert handle.hit == (key in there), "a copy was lost, or a hit invented"
        self.uses += 1
        fill = Fill(number % len(self.known), handle, handle.address, complete=handle.hit)
        if not handle.hit:
            assert not self.device.read_within(fill.address, SIZES[key[0]]), (
                "I10: given while a copy reads it"
            )
            for other in (other for known in self.known for other in known.fills):
                ends = fill.address + SIZES[key[0]], other.address + other.handle.n_bytes
                assert ends[0] <= other.address or ends[1] <= fill.address, "given twice"
        if not handle.bounce:
            known.used_at[key] = self.uses
        assert fill.address % PAGE == 0
        known.fills.append(fill)
        return fill

    @rule(target=fills, number=st.integers(0, 1), key=keys, fault=st.none() | faults)
    def begin_fill_ahead(
        self, number: int, key: tuple[int, int], fault: tuple[int, type[BaseException] | None] | None
    ) -> Fill | MultipleResults:
        """Nothing is taken from anyone, and a copy that comes this way is the oldest."""
        known = self.known[number % len(self.known)]
        self.budget.relieve()  # else what is too much goes meanwhile
        in_use = {fill.handle.key for fill in known.fills if not fill.handle.bounce}
        copies = [[at for at, _ in each.pool.copies()] for each in self.known]
        used = [each.pool.stats().used_bytes for each in self.known]
        handle = FillHandle(key, SIZES[key[0]], SIZES[key[0]])
        expected = self._arm(fault)
        self.beginning = known
        try:
            room = known.pool.begin_fill_ahead(handle)
        except expected:
            known.pool.end_fill(handle)
            assert handle.block is None
            return multiple()
        finally:
            self.beginning = None
            self.device.faults.disarm()
        assert copies == [[at for at, _ in each.pool.copies()] for each in self.known], "a copy left"
        is_known = key in in_use or key in copies[number % len(self.known)]
        assert (room is FreeRoom.PRESENT) == is_known
        if room is not FreeRoom.BEGUN:
            assert used == [each.pool.stats().used_bytes for each in self.known], "memory for nothing"
            known.pool.end_fill(handle)
            return multiple()
        if self.available < FLOOR:
            assert used == [each.pool.stats().used_bytes for each in self.known], "memory that runs short"
        self.uses += 1
        known.used_at[key] = -self.uses
        fill = Fill(number % len(self.known), handle, handle.address, complete=False)
        assert not self.device.read_within(fill.address, SIZES[key[0]]), "I10: given while a copy reads it"
        known.fills.append(fill)
        return fill

    @rule(fill=fills)
    def complete_fill(self, fill: Fill) -> None:
        if not fill.complete and fill in self.known[fill.pool].fills:
            self.known[fill.pool].pool.complete_fill(fill.handle)
            fill.complete = True

    @rule(fill=consumes(fills), queued=st.booleans())
    def end_fill(self, fill: Fill, queued: bool) -> None:
        known = self.known[fill.pool]
        if fill not in known.fills:
            return
        known.fills.remove(fill)
        fence = ManualFence(self.device, fill.address) if queued else None
        known.pool.end_fill(fill.handle, fence)
        known.pool.end_fill(fill.handle)
        if not fill.complete and not fill.handle.bounce:
            known.used_at.pop(fill.handle.key)

    @rule(
        target=batches,
        number=st.integers(0, 1),
        layer=st.integers(0, len(SIZES) - 1),
        experts=st.lists(st.integers(0, N_EXPERTS - 1), unique=True, max_size=N_EXPERTS),
    )
    def acquire_copies(self, number: int, layer: int, experts: list[int]) -> Batch:
        known = self.known[number % len(self.known)]
        before = {expert: known.address_of((layer, expert)) for expert in experts}
        there = [expert for expert in experts if before[expert]]
        copies = AcquiredCopies()
        known.pool.acquire_copies(copies, layer, experts)
        assert [experts[index] for index in copies.indices] == there, "a copy was lost, or invented"
        assert copies.addresses == [before[expert] for expert in there]
        for expert in there:
            self.uses += 1
            known.used_at[layer, expert] = self.uses
        batch = Batch(number % len(self.known), layer, copies, there, copies.addresses)
        known.batches.append(batch)
        return batch

    @rule(batch=consumes(batches), queued=st.booleans())
    def release_copies(self, batch: Batch, queued: bool) -> None:
        known = self.known[batch.pool]
        if batch not in known.batches:
            return
        known.batches.remove(batch)
        fence = ManualFence(self.device, *batch.addresses) if queued and batch.addresses else None
        known.pool.release_copies(batch.copies, fence)
        known.pool.release_copies(batch.copies)

    @precondition(lambda self: self.device.fences)
    @rule(which=st.integers(0, 20))
    def a_queued_copy_ends(self, which: int) -> None:
        self.device.fences[which % len(self.device.fences)].finish()

    @rule(number=st.integers(0, 1), used=st.lists(keys, max_size=3))
    def touch(self, number: int, used: list[tuple[int, int]]) -> None:
        known = self.known[number % len(self.known)]
        there = {key for key, _ in known.pool.copies()}
        filling = {fill.handle.key for fill in known.fills if not fill.handle.bounce}
        known.pool.touch(used)
        for key in used:
            if key in there | filling:
                self.uses += 1
                known.used_at[key] = self.uses

    # ---- sizes

    @rule(number=st.integers(0, 1), budget_bytes=budgets)
    def resize(self, number: int, budget_bytes: int) -> None:
        known = self.known[number % len(self.known)]
        known.budget_bytes = budget_bytes
        known.pool.resize(budget_bytes)
        self.check_shrunk()

    @precondition(lambda self: self.limit is not None)
    @rule(limit=budgets)
    def resize_all(self, limit: int) -> None:
        self.limit = limit
        self.budget.resize(limit)
        self.check_shrunk()

    @rule(
        available=st.sampled_from([0, FLOOR - 2 * PAGE, FLOOR, 2 * FLOOR, 2 * FLOOR + 3 * PAGE, 100 * FLOOR])
    )
    def memory_changes(self, available: int) -> None:
        self.available = available
        self.now_s += INTERVAL_S
        used, ceiling = self.budget.used_bytes, self.budget.limit_bytes
        self.budget.relieve()
        if available < FLOOR:
            assert self.budget.limit_bytes <= max(0, used - (FLOOR * 3 // 2 - available))
            self.check_shrunk()
        elif available <= 2 * FLOOR:
            assert self.budget.limit_bytes == ceiling, "changed between the marks"
        elif available == 100 * FLOOR:
            assert self.budget.limit_bytes == self.whole_limit(), "does not come back"

    def whole_limit(self) -> int:
        """What all pools may take: without a limit the largest claim, of no more than all experts if known."""
        if self.limit is not None:
            return self.limit
        largest = max(known.budget_bytes for known in self.known)
        return min(largest, self.all_experts_bytes) if self.knows_experts else largest

    def check_shrunk(self) -> None:
        """Only what is in use keeps a pool above its budget."""
        if not any(known.fills or known.batches for known in self.known) and not self.device.fences:
            assert self.budget.used_bytes <= self.budget.limit_bytes
            for known in self.known:
                assert known.pool.stats().used_bytes <= known.budget_bytes

    # ---- after every step, and at every allocation

    def check_budget(self) -> None:
        """I3, by the device's own books."""
        bounce = self.budget.bounce_bytes
        assert self.device.pinned_bytes - bounce <= self.budget.limit_bytes <= self.whole_limit(), "I3"
        if self.beginning is not None:
            assert self.beginning.pool.stats().used_bytes <= self.beginning.budget_bytes, "I3: of the pool"

    @invariant()
    def everything_holds(self) -> None:
        if not hasattr(self, "known"):
            return
        for number, known in enumerate(self.known):
            known.pool.check_valid()
            copies = [key for key, _ in known.pool.copies()]
            times = [known.used_at[key] for key in copies]
            assert times == sorted(times), "the order of use"
            for fill in known.fills:
                if not fill.handle.bounce:
                    assert known.pool.contains(fill.handle.key) == fill.complete, "a copy in use was evicted"
                    assert fill.handle.address == fill.address
            for batch in known.batches:
                kept = [known.address_of((batch.layer, expert)) for expert in batch.experts]
                assert kept == batch.addresses, "a copy in use was evicted"
            stats = known.pool.stats()
            counters = {
                name: getattr(stats, name)
                for name in (
                    "hits",
                    "misses",
                    "evictions",
                    "bytes_in",
                    "ahead_fills",
                    "ahead_bytes",
                    "peak_bytes",
                    "given_back_bytes",
                    "refusals",
                )
            }
            assert all(value >= self.last[number].get(name, 0) for name, value in counters.items()), "I14"
            self.last[number] = counters
            assert 0 <= stats.rounding_bytes <= stats.used_bytes
            unit = self.device.rounding(whole_pages(max(SIZES)))
            assert stats.bounce_bytes == N_BOUNCE_BLOCKS * unit
        used = sum(known.pool.stats().used_bytes for known in self.known)
        assert self.budget.used_bytes == used <= self.budget.peak_bytes
        assert self.device.pinned_bytes == used + self.budget.bounce_bytes, "I3: the books differ"

    def teardown(self) -> None:
        if not hasattr(self, "known"):
            return
        for known in self.known:
            for fill in list(known.fills):
                self.end_fill(fill, queued=True)
            for batch in list(known.batches):
                self.release_copies(batch, queued=True)
            known.pool.close()
            known.pool.close()
        assert self.device.live == {}, "I15"
        assert self.budget.used_bytes == self.budget.bounce_bytes == 0


TestHostPoolMachine = HostPoolMachine.TestCase
TestHostPoolMachine.settings = settings(
    stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
