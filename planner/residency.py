"""Residency tables: which expert is in which slot of L1, as arrays that Python and C++ share.

L layers, E the most experts of any layer, S slots in all; the slots of a layer are contiguous, and slot
numbers outside this file count from their layer's first.

    slot_of    int32[L, E]   an expert's slot, -1 where it has none
    owner      int32[S]      the slot's expert, -1 where it is FREE
    ready      uint8[S]      1 when the expert's bytes are complete
    pins       int32[S]      how many users hold the slot
    heat       int32[L, E]   an expert's decayed use count; it survives eviction
    last_use   int64[S]      the layer's clock at the slot's last use
    evicted    int32[S]      the expert that the slot's owner replaced, -1 if none
    clock      int64[L]      the layer's `begin` calls
    first      int32[L]      the layer's first slot
    n_slots    int32[L]      its slots
    n_experts  int32[L]      its experts
    counters   int64[L, 6]   calls, hits, misses, evictions, fills, aborts
    settings   int64[1]      the policy's number
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from expertier.planner.policy_kind import PolicyKind

I32 = npt.NDArray[np.int32]

ARRAYS = (
    "slot_of",
    "owner",
    "ready",
    "pins",
    "heat",
    "last_use",
    "evicted",
    "clock",
    "first",
    "n_slots",
    "n_experts",
    "counters",
    "settings",
)
"""The arrays in the order in which the directory lists their addresses."""

DIRECTORY_HEAD = 4
"""Entries of the directory before the addresses: the policy's stamp, L, E and S."""


class Residency:
    """The residency tables of one model, with the policy's calls as methods.

    The caller holds the layer's lock around each method, exactly as a C++ caller of the entry points does.
    Numba is imported here and not with the package. `slots`, `miss_index` and `experts` are contiguous int32
    arrays.
    """

    def __init__(self, n_experts: Sequence[int], n_slots: Sequence[int], kind: PolicyKind) -> None:
        """Make empty tables; `n_experts` and `n_slots` give one number a layer."""
        from expertier.planner import policy

        n_layers = len(n_experts)
        if n_layers == 0 or len(n_slots) != n_layers:
            raise ValueError(
                f"{n_layers} layers of experts and {len(n_slots)} of slots: give both for each layer"
            )
        if min(n_experts) < 1 or min(n_slots) < 1:
            raise ValueError(f"every layer needs an expert and a slot: experts {n_experts}, slots {n_slots}")
        self._policy = policy
        self._kind = kind
        self.clock = np.zeros(n_layers, np.int64)
        self.heat = np.zeros((n_layers, max(n_experts)), np.int32)
        self.n_experts = np.array(n_experts, np.int32)
        self.counters = np.zeros((n_layers, policy.N_COUNTERS), np.int64)
        number = {PolicyKind.LFU_DECAY: policy.KIND_LFU_DECAY, PolicyKind.LRU: policy.KIND_LRU}[kind]
        self.settings = np.full(policy.N_SETTINGS, number, np.int64)
        self._make_slots(n_slots)

    def _make_slots(self, n_slots: Sequence[int]) -> None:
        n_layers, max_experts = self.heat.shape
        total = sum(n_slots)
        self.slot_of = np.full((n_layers, max_experts), -1, np.int32)
        self.owner = np.full(total, -1, np.int32)
        self.ready = np.zeros(total, np.uint8)
        self.pins = np.zeros(total, np.int32)
        self.last_use = np.zeros(total, np.int64)
        self.evicted = np.full(total, -1, np.int32)
        self.n_slots = np.array(n_slots, np.int32)
        self.first = np.concatenate(([0], np.cumsum(self.n_slots)[:-1])).astype(np.int32)
        arrays = [getattr(self, name) for name in ARRAYS]
        assert all(array.flags.c_contiguous for array in arrays)
        head = [self._policy.source_stamp(), n_layers, max_experts, total]
        self._directory = np.array([*head, *(array.ctypes.data for array in arrays)], np.int64)
        self._begin_arrays = tuple(arrays)

    @property
    def kind(self) -> PolicyKind:
        """The policy that chooses victims."""
        return self._kind

    @property
    def directory_address(self) -> int:
        """Address of the table of addresses that the C entry points take; valid until `resize`."""
        return int(self._directory.ctypes.data)

    # ---- the policy's calls

    def begin(self, layer: int, experts: I32, slots: I32, miss_index: I32) -> int:
        """Look up and pin `experts`; see `policy.begin`. `slots` and `miss_index` are at least as long."""
        return self._policy.begin(layer, experts, len(experts), slots, miss_index, *self._begin_arrays)

    def complete(self, layer: int, slots: I32) -> int:
        """Make FILLING slots READY; see `policy.complete`."""
        return self._policy.complete(
            layer, slots, len(slots), self.owner, self.ready, self.first, self.n_slots, self.counters
        )

    def abort(self, layer: int, slots: I32) -> int:
        """Undo a `begin` whose fill failed; see `policy.abort`."""
        return self._policy.abort(
            layer,
            slots,
            len(slots),
            self.slot_of,
            self.owner,
            self.ready,
            self.pins,
            self.first,
            self.n_slots,
            self.counters,
        )

    def release(self, layer: int, slots: I32) -> int:
        """Unpin slots; see `policy.release`."""
        return self._policy.release(layer, slots, len(slots), self.pins, self.first, self.n_slots)

    def resident_first(self, layer: int, experts: I32) -> int:
        """Reorder `experts` in place; see `policy.resident_first`."""
        return self._policy.resident_first(layer, experts, len(experts), self.slot_of, self.n_experts)

    # ---- what Python asks besides

    def is_filling(self, layer: int, experts: I32) -> bool:
        """Whether one of `experts` is being filled: a wait for it ends without anyone's help."""
        slots = self.slot_of[layer, experts]
        return bool((self.ready[self.first[layer] + slots[slots >= 0]] == 0).any())

    def is_chosen(self, layer: int, experts: I32, slots: I32) -> bool:
        """Whether each of `slots` is FILLING with its expert, as `begin` left it; needs no lock for one's own."""
        if not 0 <= layer < len(self.n_slots) or experts.shape != slots.shape or experts.ndim != 1:
            return False
        if not ((slots >= 0) & (slots < self.n_slots[layer])).all():
            return False
        taken = self.first[layer] + slots
        return bool(((self.owner[taken] == experts) & (self.ready[taken] == 0)).all())

    def evicted_from(self, layer: int, slots: I32) -> list[int]:
        """Return the experts that the last `begin` put out of `slots`, which the caller holds pinned."""
        return [expert for expert in self.evicted[self.first[layer] + slots].tolist() if expert >= 0]

    def residents(self, layer: int) -> dict[int, int]:
        """Return expert → slot for the layer's READY slots."""
        low = int(self.first[layer])
        high = low + int(self.n_slots[layer])
        ready = np.flatnonzero(self.ready[low:high])
        return dict(zip(self.owner[low:high][ready].tolist(), ready.tolist(), strict=True))

    def pins_of(self, layer: int) -> list[int]:
        """Return how often each slot of the layer is pinned."""
        low = int(self.first[layer])
        return [int(pins) for pins in self.pins[low : low + int(self.n_slots[layer])]]

    def totals(self) -> Mapping[str, int]:
        """Return the counters summed over layers: calls, hits, misses, evictions, fills, aborts."""
        names = ("calls", "hits", "misses", "evictions", "fills", "aborts")
        return MappingProxyType(dict(zip(names, self.counters.sum(axis=0).tolist(), strict=True)))

    def fills_by_layer(self) -> list[int]:
        """Return how many fills each layer completed."""
        fills: list[int] = self.counters[:, self._policy.FILLS].tolist()
        return fills

    def resize(self, n_slots: Sequence[int]) -> None:
        """Give the layers other numbers of slots; nothing may be pinned.

        Every expert leaves its slot and counts as evicted; heat and counters stay. The directory's address
        changes.
        """
        if len(n_slots) != len(self.n_experts) or min(n_slots) < 1:
            raise ValueError(f"{len(self.n_experts)} layers need a slot each: got {list(n_slots)}")
        assert not self.pins.any(), "resize while a slot is pinned"
        for layer in range(len(self.n_experts)):
            self.counters[layer, self._policy.EVICTIONS] += len(self.residents(layer))
        self._make_slots(n_slots)

    def check_valid(self) -> None:
        """Assert conservation, bijection, readiness and the counters (I4, I5, I8, I14)."""
        for layer in range(len(self.n_experts)):
            low = int(self.first[layer])
            high = low + int(self.n_slots[layer])
            owners = self.owner[low:high].tolist()
            taken = {expert: slot for slot, expert in enumerate(owners) if expert >= 0}
            assert len(taken) == sum(expert >= 0 for expert in owners), (
                f"layer {layer}: an expert in two slots"
            )
            found = {e: s for e, s in enumerate(self.slot_of[layer].tolist()) if s >= 0}
            assert found == taken, f"layer {layer}: slot_of {found} and owner {taken} disagree"
            for slot in range(low, high):
                free, ready, pins = self.owner[slot] < 0, bool(self.ready[slot]), int(self.pins[slot])
                assert pins >= 0, f"layer {layer}: slot {slot - low} has {pins} pins"
                assert not (free and (ready or pins)), (
                    f"layer {layer}: FREE slot {slot - low} is ready or pinned"
                )
                assert free or ready or pins, f"layer {layer}: slot {slot - low} is filled by no one"
            calls, _, _, evictions, fills, _ = self.counters[layer].tolist()
            assert fills - evictions == len(self.residents(layer)), (
                f"layer {layer}: fills, evictions, residents"
            )
            assert calls == self.clock[layer], f"layer {layer}: {calls} calls, clock {self.clock[layer]}"
