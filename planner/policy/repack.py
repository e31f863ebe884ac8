"""Who stays, and in which slot, when the slots of all layers are laid out anew (D4, D16)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from expertier.planner.policy.residency import Residency

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]

NOT_IN_LINE = -(1 << 62)
"""The shift of a layer whose slots do not lie on each other, in an array of shifts."""


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


class Survivors(NamedTuple):
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
    n_slots: Sequence[int] | I32,
    shifts: Sequence[int | None] | I64,
    *,
    whole_in_order: bool = False,
) -> Survivors:
    """Choose who stays in layers of `n_slots` slots: all READY experts where they fit, otherwise the hottest.

    The policy's own order decides: whoever would be evicted last stays first. `shifts[layer]` says where
    things lie: the memory of old slot `i` is that of new slot `i - shift`, or None (in an array `NOT_IN_LINE`) when
    no slot lines up with another. Slots keep their order; as many as can be stay where they are in memory. With
    `whole_in_order`, in a layer with a slot for every expert those stay that can have the slots of their own numbers,
    as an engine likes them best (`policy.is_whole`); the others are to be fetched again. Pure: nothing changes.
    Nothing may be pinned.
    """
    if not len(n_slots) == len(shifts) == len(residency.n_slots):
        raise ValueError(
            f"asked to repack {len(residency.n_slots)} layers: got {len(n_slots)} numbers of slots and "
            f"{len(shifts)} shifts, give one of each for every layer"
        )
    if not isinstance(n_slots, np.ndarray):
        n_slots = np.array(n_slots, np.int32)
    if not isinstance(shifts, np.ndarray):
        shifts = np.array([NOT_IN_LINE if shift is None else shift for shift in shifts], np.int64)
    kept = np.empty((4, len(residency.owner)), np.int32)
    n_kept = residency.choose_survivors(n_slots, shifts, kept, whole_in_order=whole_in_order)
    assert n_kept >= 0, "survivors are chosen while a slot is pinned"
    return Survivors(kept[0, :n_kept], kept[1, :n_kept], kept[2, :n_kept], kept[3, :n_kept])
