"""Residency tables: which expert is in which slot of L1, as arrays that Python and C++ share.

L layers, E the most experts of any layer, S slots in all; the slots of a layer are contiguous, and slot
numbers outside this file count from their layer's first. `tables.py` says what the arrays mean.

    slot_of    int32[L, E]
    heat       uint8[L, E]
    owner      int32[S]
    state      uint8[S]
    pins       int32[S]
    order      int64[S]
    evicted_by int32[S]
    counters   int64[L, 9]
    notes      int32[L, N]
    first      int32[L]      the layer's first slot
    n_slots    int32[L]      its slots
    n_experts  int32[L]      its experts
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from expertier.interrupts import raise_pending
from expertier.planner.policy.kind import PolicyKind
from expertier.planner.policy.operations import IN_DIRECTORY
from expertier.planner.policy.outcome import COMPLETE_AND_RELEASE, Outcome
from expertier.planner.policy.repack import SurvivorColumns, Survivors
from expertier.planner.profiles.profile import scaled_heat

if TYPE_CHECKING:
    from expertier.planner.policy.repack_calls import NewTables
    from expertier.planner.policy.tables import LayerView

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]

MOST_SLOTS = 1 << 16
"""A layer's slots must fit the low bits of `order`."""

_BUSY = int(Outcome.BUSY)


class Residency:
    """The residency tables of one model, with the policy's calls as methods.

    The caller holds the layer's lock around each method, exactly as a C++ caller of the entry points does.
    Numba is imported here and not with the package. `slots`, `miss_index` and `experts` are contiguous int32
    arrays.
    """

    def __init__(self, n_experts: Sequence[int], n_slots: Sequence[int], kind: PolicyKind) -> None:
        """Make empty tables; `n_experts` and `n_slots` give one number a layer."""
        from expertier.planner.policy import repack_calls, tables
        from expertier.planner.policy.calls import locked_calls, native

        n_layers = len(n_experts)
        if n_layers == 0 or len(n_slots) != n_layers:
            raise ValueError(
                f"{n_layers} layers of experts and {len(n_slots)} of slots: give both for each layer"
            )
        if min(n_experts) < 1 or min(n_slots) < 1 or max(n_slots) > MOST_SLOTS:
            raise ValueError(
                f"every layer needs an expert and 1 to {MOST_SLOTS} slots: experts {n_experts}, slots {n_slots}"
            )
        self._tables = tables
        self._kind = kind
        self._rule = native.rule_of(kind)
        words = max(self._rule.n_notes(n) for n in n_experts)
        self.n_experts = np.array(n_experts, np.int32)
        self.heat = np.zeros((n_layers, max(n_experts)), np.uint8)
        self.counters = np.zeros((n_layers, tables.N_COUNTERS), np.int64)
        self.notes = np.zeros((n_layers, words), np.int32)
        self._functions = [0] * len(IN_DIRECTORY)
        if tables.COMPILED:
            # The first time this compiles for seconds, and so do the calls below.
            points = native.entry_points()
            raise_pending()
            self._functions = [getattr(points, operation.name) for operation in IN_DIRECTORY]
            self._functions[0] = native.begin_of(kind).address  # the policy's own
        self._make_slots(n_slots)
        self._locked = locked_calls.locked_calls()
        self._repack = repack_calls.repack_calls()

    def _make_slots(self, n_slots: Sequence[int]) -> None:
        new = self._new_tables(n_slots)
        new.slot_of.fill(-1)
        new.owner.fill(-1)
        new.state.fill(0)
        new.pins.fill(0)
        new.evicted_by.fill(-1)
        free = self._tables.RANK_FREE << self._tables.SLOT_BITS
        new.order[:] = np.concatenate([np.arange(n, dtype=np.int64) for n in n_slots]) | free
        self._take(new)
        self._directory = self._make_directory()
        self._address = int(self._directory.ctypes.data)

    def _new_tables(self, n_slots: Sequence[int]) -> NewTables:
        """Return memory for tables of these numbers of slots; only `first` and `n_slots` are filled in."""
        from expertier.planner.policy.repack_calls import NewTables

        numbers = np.array(n_slots, np.int32)
        ends = np.cumsum(numbers, dtype=np.int32)
        total = int(ends[-1])
        return NewTables(
            first=ends - numbers,
            n_slots=numbers,
            slot_of=np.empty(self.heat.shape, np.int32),
            owner=np.empty(total, np.int32),
            state=np.empty(total, np.uint8),
            pins=np.empty(total, np.int32),
            order=np.empty(total, np.int64),
            evicted_by=np.empty(total, np.int32),
        )

    def _take(self, new: NewTables) -> None:
        self.first, self.n_slots, self.slot_of = new.first, new.n_slots, new.slot_of
        self.owner, self.state, self.pins = new.owner, new.state, new.pins
        self.order, self.evicted_by = new.order, new.evicted_by

    def _make_directory(self) -> I64:
        """Write the addresses of all arrays into a new directory, as `tables.py` says."""
        tables = self._tables
        head = np.zeros(tables.HEAD, np.int64)
        head[tables.STAMP] = tables.source_stamp()
        head[tables.N_LAYERS] = len(self.n_experts)
        head[tables.KIND] = list(PolicyKind).index(self._kind)
        head[tables.BEGIN : tables.BEGIN + len(self._functions)] = self._functions
        rows = np.zeros((len(self.n_experts), tables.ROW), np.int64)
        rows[:, tables.N_EXPERTS] = self.n_experts
        rows[:, tables.N_SLOTS] = self.n_slots
        rows[:, tables.N_NOTES] = self.notes.shape[1]
        for column, array in (
            (tables.SLOT_OF, self.slot_of),
            (tables.HEAT, self.heat),
            (tables.COUNTERS, self.counters),
            (tables.NOTES, self.notes),
        ):
            rows[:, column] = array.ctypes.data + np.arange(len(rows)) * array.strides[0]
        first = self.first.astype(np.int64)
        for column, by_slot in (
            (tables.OWNER, self.owner),
            (tables.STATE, self.state),
            (tables.PINS, self.pins),
            (tables.ORDER, self.order),
            (tables.EVICTED_BY, self.evicted_by),
        ):
            rows[:, column] = by_slot.ctypes.data + first * by_slot.itemsize
        return np.concatenate([head, rows.ravel()])

    @property
    def kind(self) -> PolicyKind:
        """The policy that chooses victims."""
        return self._kind

    @property
    def directory_address(self) -> int:
        """Address of the table of addresses that the C entry points take; valid until `resize`."""
        return self._address

    # ---- the policy's calls; each takes the layer's lock, which the caller does not hold: see `locked_calls.py`

    def try_pin_hits(self, locks: int, layer: int, experts: I32, held: I32) -> int:
        """Pin `experts` if all are READY and the layer's lock is free; `held` are their slots then.

        `locks` is the locks' address. Returns 0 where it has done what `begin` does for hits, or another number, and
        has changed nothing.
        """
        return self._locked.try_pin_hits(self._address, locks, layer, experts, held)

    def try_release_held(self, locks: int, layer: int, held: I32) -> int:
        """Unpin the slots that `held` says are pinned and wake waiters, if the layer's lock is free.

        Returns 0. Returns BUSY where the lock is taken, or BAD_CALL as `release` does, and has changed nothing.
        """
        return self._locked.try_release_held(self._address, locks, layer, held)

    def begin_held(
        self, locks: int, layer: int, experts: I32, held: I32, miss_index: I32, deadline: int, *, waits: bool
    ) -> int:
        """Do what `begin` does, and note in `held` that the slots are pinned; wait once where `begin` is BUSY.

        It waits for a change of the layer if one of the layer's slots is being filled or if `waits` is set, until the
        `timespec` at address `deadline` at the latest. Returns LOOK_AGAIN where a slot is still being filled then.
        """
        status = self._locked.try_begin_held(self._address, locks, layer, experts, held, miss_index)
        if status != _BUSY:
            return status
        return self._locked.begin_held(
            self._address, locks, layer, experts, held, miss_index, deadline, waits
        )

    def complete_held(self, locks: int, layer: int, held: I32) -> int:
        """Make the FILLING slots of `held` READY and wake waiters; all slots stay pinned."""
        return self._update_held(locks, self._tables.COMPLETE, layer, held)

    def finish_held(self, locks: int, layer: int, held: I32) -> int:
        """Make the FILLING slots of `held` READY, unpin all slots and wake waiters."""
        return self._update_held(locks, COMPLETE_AND_RELEASE, layer, held)

    def abort_held(self, locks: int, layer: int, held: I32) -> int:
        """Do what `abort` does with the slots of `held`, if they are pinned, and wake waiters."""
        return self._update_held(locks, self._tables.ABORT, layer, held)

    def release_held(self, locks: int, layer: int, held: I32) -> int:
        """Unpin the slots of `held`, if they are pinned, and wake waiters; waits for the lock."""
        return self._update_held(locks, self._tables.RELEASE, layer, held)

    def order_resident_first(self, locks: int, layer: int, experts: I32) -> int:
        """Reorder `experts` in place; see `queries.resident_first`."""
        return self._locked.resident_first(self._address, locks, layer, experts)

    def take_for_prefetch(self, locks: int, layer: int, expert: int) -> int:
        """Choose a slot for an expert that is prefetched; see `policy.begin_prefetch`."""
        return self._locked.begin_prefetch(self._address, locks, layer, expert)

    def _update_held(self, locks: int, entry: int, layer: int, held: I32) -> int:
        status = self._locked.try_update_held(self._address, locks, entry, layer, held)
        if status != _BUSY:
            return status
        return self._locked.update_held(self._address, locks, entry, layer, held)

    # ---- what Python asks beside the policy's calls

    def is_chosen(self, layer: int, experts: I32, slots: I32) -> bool:
        """Whether each of `slots` is FILLING with its expert, as `begin` left it; needs no lock for its own pins."""
        if not 0 <= layer < len(self.n_slots) or experts.shape != slots.shape or experts.ndim != 1:
            return False
        if not ((slots >= 0) & (slots < self.n_slots[layer])).all():
            return False
        taken = self.first[layer] + slots
        return bool(((self.owner[taken] == experts) & (self.state[taken] & self._tables.READY == 0)).all())

    def experts_evicted_by(self, layer: int, slots: I32) -> list[int]:
        """Return the experts that the last `begin` put out of `slots`, which the caller holds pinned."""
        return [expert for expert in self.evicted_by[self.first[layer] + slots].tolist() if expert >= 0]

    def has_free(self, layer: int) -> bool:
        """Whether a slot of the layer has no expert; needs no lock where an outdated answer does no harm."""
        low = int(self.first[layer])
        return bool((self.owner[low : low + int(self.n_slots[layer])] < 0).any())

    def residents(self, layer: int) -> dict[int, int]:
        """Return expert → slot for the layer's READY slots."""
        low = int(self.first[layer])
        high = low + int(self.n_slots[layer])
        ready = np.flatnonzero(self.state[low:high] & self._tables.READY)
        return dict(zip(self.owner[low:high][ready].tolist(), ready.tolist(), strict=True))

    def pins_of(self, layer: int) -> list[int]:
        """Return how often each slot of the layer is pinned."""
        low = int(self.first[layer])
        return [int(pins) for pins in self.pins[low : low + int(self.n_slots[layer])]]

    def missing_where_all_fit(self) -> list[tuple[int, int]]:
        """Return the (layer, expert) pairs without a slot, of the layers that have a slot for every expert."""
        layers = np.flatnonzero(self.n_slots == self.n_experts)
        if not len(layers):
            return []
        rows, experts = np.nonzero(
            (self.slot_of[layers] < 0) & (np.arange(self.slot_of.shape[1]) < self.n_experts[layers, None])
        )
        return list(zip(layers[rows].tolist(), experts.tolist(), strict=True))

    def totals(self) -> Mapping[str, int]:
        """Return the counters summed over layers, by the names in `tables.COUNTER_NAMES`."""
        totals = self.counters.sum(axis=0).tolist()
        return MappingProxyType(dict(zip(self._tables.COUNTER_NAMES, totals, strict=True)))

    def by_layer(self, name: str) -> list[int]:
        """Return one counter of every layer, by its name in `tables.COUNTER_NAMES`."""
        counts: list[int] = self.counters[:, self._tables.COUNTER_NAMES.index(name)].tolist()
        return counts

    def fills_by_layer(self) -> list[int]:
        """Return how many fills each layer completed, prefetches included."""
        return self.by_layer("fills")

    def choose_survivors(
        self, n_slots: I32, shifts: I64, survivors: I32, *, in_order_where_all_fit: bool
    ) -> int:
        """Choose which experts stay, and their slots, for `repack.choose_survivors`; see `repack_calls.py`."""
        return self._repack.choose(self._address, n_slots, shifts, in_order_where_all_fit, survivors)

    # ---- changes from outside, with nothing pinned

    def resize(self, n_slots: Sequence[int]) -> None:
        """Give the layers other numbers of slots; nothing may be pinned.

        Every expert leaves its slot and counts as evicted; heat and counters stay. The directory's address
        changes.
        """
        self.repack(n_slots, Survivors.none())

    def repack(self, n_slots: Sequence[int], survivors: SurvivorColumns) -> None:
        """Give the layers other numbers of slots and let `survivors` stay, READY in their new ones.

        `survivors` is what `repack.choose_survivors` chose for these tables and `n_slots`, or a subset of it. All other
        experts count as evicted; heat, counters and the survivors' ranks stay. Nothing may be pinned. The directory's
        address changes. Raises `ValueError`, and changes nothing, where `n_slots` is not a number of slots for each
        layer.
        """
        if len(n_slots) != len(self.n_experts) or min(n_slots) < 1 or max(n_slots) > MOST_SLOTS:
            raise ValueError(
                f"{len(self.n_experts)} layers need 1 to {MOST_SLOTS} slots each: got {list(n_slots)}"
            )
        assert not self.pins.any(), "repack while a slot is pinned"
        new = self._new_tables(n_slots)
        directory = self._directory.copy()
        status = self._repack.move(
            self._address,
            directory,
            survivors.layer,
            survivors.expert,
            survivors.old_slot,
            survivors.new_slot,
            new,
        )
        assert status == 0, "a survivor is not in its slot, or gets one outside of its layer's"
        self._take(new)
        self._directory = directory
        self._address = int(directory.ctypes.data)

    def seed_heat(self, counts: npt.NDArray[np.generic]) -> None:
        """Take the experts' heat from a profile: uses by layer and expert, [L, E] numbers of any type.

        The most used expert of a layer gets the full heat of 255, and the layer's other experts get their share of it.
        Slots do not change. The caller holds all layers' locks, or no other thread uses the tables. Raises `ValueError`
        for counts of another shape.
        """
        if counts.shape != self.heat.shape:
            raise ValueError(
                f"asked to take the heat of {counts.shape} experts: the tables have {self.heat.shape}, layers "
                "by experts; make the profile from this model"
            )
        self.heat[...] = scaled_heat(counts)
        used = np.flatnonzero(self.order >= 1 << self._tables.SLOT_BITS)  # neither FREE nor speculative
        heat = self.heat[np.repeat(np.arange(len(self.n_slots)), self.n_slots)[used], self.owner[used]]
        rank = self._rule.reheated(self.order[used] >> self._tables.SLOT_BITS, heat.astype(np.int64))
        self.order[used] = (rank << self._tables.SLOT_BITS) | (self.order[used] & (MOST_SLOTS - 1))

    # ---- the check

    def check_valid(self) -> None:
        """Assert conservation, bijection, readiness, ranks and the counters (I4, I5, I8, I14)."""
        for layer in range(len(self.n_experts)):
            self._tables.check_layer(self.layer_view(layer), f"layer {layer}")

    def layer_view(self, layer: int) -> LayerView:
        """Return one layer's arrays, shared and not copied; valid until `repack`."""
        low = int(self.first[layer])
        slots = slice(low, low + int(self.n_slots[layer]))
        return self._tables.LayerView(
            self.slot_of[layer, : self.n_experts[layer]],
            self.heat[layer, : self.n_experts[layer]],
            self.owner[slots],
            self.state[slots],
            self.pins[slots],
            self.order[slots],
            self.evicted_by[slots],
            self.counters[layer],
            self.notes[layer],
        )
