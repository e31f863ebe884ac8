"""Who stays, and in which slot, when the slots of all layers are laid out anew (D4, D16)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from expertier.planner.residency import Residency

I32 = npt.NDArray[np.int32]


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


def survivors(residency: Residency, n_slots: Sequence[int], shifts: Sequence[int | None]) -> Survivors:
    """Choose who stays in layers of `n_slots` slots: all READY experts where they fit, otherwise the hottest.

    The policy's own order decides: whoever would be evicted last stays first. `shifts[layer]` says where
    things lie: the memory of old slot `i` is that of new slot `i - shift`, or None when no slot lines up with
    another. Slots keep their order; as many as can be stay where they are in memory. Pure: nothing changes.
    Nothing may be pinned.
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
        places = _places(kept.tolist(), n_new, shift)
        columns.append(
            (
                np.full(len(kept), layer, np.int32),
                view.owner[kept],
                kept.astype(np.int32),
                np.array(places, np.int32),
            )
        )
    return Survivors(*(np.concatenate(column) for column in zip(*columns, strict=True)))


def _places(old_slots: Sequence[int], n_new: int, shift: int | None) -> list[int]:
    """Return new slots for rising `old_slots`: rising, below `n_new`, in place where that is possible."""
    if shift is None:
        return list(range(len(old_slots)))
    places: list[int] = []
    above = n_new
    for k in range(len(old_slots) - 1, -1, -1):
        above = min(above - 1, max(old_slots[k] - shift, k))
        places.append(above)
    return places[::-1]
