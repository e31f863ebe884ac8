"""Who stays, and in which slot, when the slots of all layers are laid out anew (D4, D16)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from expertier.planner.residency import Residency

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]


class Kept(Protocol):
    """What `Residency.repack` asks of the experts that stay: `Survivors` has it."""

    @property
    def layer(self) -> I32:
        """Their layers."""

    @property
    def expert(self) -> I32:
        """Their numbers."""

    @property
    def old_slot(self) -> I32:
        """Where they are."""

    @property
    def new_slot(self) -> I32:
        """Where they will be."""


@dataclass(frozen=True, slots=True, eq=False)
class Survivors:
    """The experts that stay: int32 arrays of one length, by layer, then by slot.

    Within a layer both `old_slot` and `new_slot` rise, so there is always an order in which the copies
    overwrite no survivor: those that move up from the last to the first, then those that move down from the
    first to the last.
    """

    layer: I32
    expert: I32
    old_slot: I32
    new_slot: I32

    @staticmethod
    def none() -> Survivors:
        """Return what stays when nobody does."""
        empty = np.zeros(0, np.int32)
        return Survivors(empty, empty, empty, empty)


def survivors(
    residency: Residency,
    n_slots: Sequence[int],
    shifts: Sequence[int | None],
    *,
    whole_in_order: bool = False,
) -> Survivors:
    """Choose who stays in layers of `n_slots` slots: all READY experts where they fit, otherwise the hottest.

    The policy's own order decides: whoever would be evicted last stays first. `shifts[layer]` says where
    things lie: the memory of old slot `i` is that of new slot `i - shift`, or None when no slot lines up with
    another. Slots keep their order; as many as can be stay where they are in memory. With `whole_in_order`, in a layer
    with a slot for every expert those stay that can have the slots of their own numbers, as an engine likes them best
    (`policy.is_whole`); the others are to be fetched again. Pure: nothing changes. Nothing may be pinned.
    """
    assert not residency.pins.any(), "survivors are chosen while a slot is pinned"
    if not len(n_slots) == len(shifts) == len(residency.n_slots):
        raise ValueError(
            f"asked to repack {len(residency.n_slots)} layers: got {len(n_slots)} numbers of slots and "
            f"{len(shifts)} shifts, give one of each for every layer"
        )
    columns: list[tuple[I32, I32, I32, I32]] = []
    for layer, (n_new, shift) in enumerate(zip(n_slots, shifts, strict=True)):
        view = residency.layer_view(layer)
        kept = np.flatnonzero(view.owner >= 0)  # no pins, so all of them are READY
        if len(kept) > n_new:
            coldest_first = np.argsort(view.order[kept], kind="stable")
            kept = np.sort(kept[coldest_first[len(kept) - n_new :]])
        if whole_in_order and n_new == len(view.slot_of):
            kept = kept[_longest_rise(view.owner[kept].tolist())]
            places = view.owner[kept].astype(np.int64)
        else:
            places = _places(kept, n_new, shift)
        columns.append(
            (
                np.full(len(kept), layer, np.int32),
                view.owner[kept],
                kept.astype(np.int32),
                places.astype(np.int32),
            )
        )
    return Survivors(*(np.concatenate(column) for column in zip(*columns, strict=True)))


def _longest_rise(numbers: Sequence[int]) -> list[int]:
    """Return the indices of a longest subsequence of distinct numbers that rises."""
    last: list[int] = []  # of each length, the index of the lowest number that ends such a subsequence
    lowest: list[int] = []
    before = [-1] * len(numbers)
    for i, number in enumerate(numbers):
        length = bisect_left(lowest, number)
        before[i] = last[length - 1] if length else -1
        last[length:] = [i, *last[length + 1 :]]
        lowest[length:] = [number, *lowest[length + 1 :]]
    chosen: list[int] = []
    i = last[-1] if last else -1
    while i >= 0:
        chosen.append(i)
        i = before[i]
    return chosen[::-1]


def _places(old_slots: I64, n_new: int, shift: int | None) -> I64:
    """Return new slots for rising `old_slots`: rising, below `n_new`, in place where that is possible."""
    ranks = np.arange(len(old_slots))
    if shift is None:
        return ranks
    # From the last one down, each lies where it is, or right below the one above it where that lies too low.
    above = np.maximum(old_slots - shift - ranks, 0)
    lowest: I64 = np.minimum.accumulate(above[::-1])[::-1]
    return ranks + np.minimum(lowest, n_new - len(old_slots))
