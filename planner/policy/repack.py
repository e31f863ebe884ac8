"""Which experts stay, and in which slots, when the slots of all layers are laid out anew (D4, D16)."""

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


class SurvivorColumns(Protocol):
    """The columns that `Residency.repack` reads of the experts that stay; `Survivors` has them."""

    @property
    def layer(self) -> I32:
        """The survivors' layers."""

    @property
    def expert(self) -> I32:
        """The survivors' numbers."""

    @property
    def old_slot(self) -> I32:
        """The slots that the survivors are in."""

    @property
    def new_slot(self) -> I32:
        """The slots that the survivors will be in."""


class Survivors(NamedTuple):
    """The experts that stay: int32 arrays of equal length, sorted by layer, then by slot.

    Within a layer both `old_slot` and `new_slot` rise, so there is always an order in which the copies
    overwrite no survivor: first the survivors that move up, from the last to the first, then the survivors that move
    down, from the first to the last.
    """

    layer: I32
    expert: I32
    old_slot: I32
    new_slot: I32

    @staticmethod
    def none() -> Survivors:
        """Return no survivors: every expert leaves."""
        empty = np.zeros(0, np.int32)
        return Survivors(empty, empty, empty, empty)


def choose_survivors(
    residency: Residency,
    n_slots: Sequence[int] | I32,
    shifts: Sequence[int | None] | I64,
    *,
    in_order_where_all_fit: bool = False,
) -> Survivors:
    """Choose the experts that stay in layers of `n_slots` slots: all READY ones if they fit, otherwise the hottest.

    The policy's order decides: the experts that it would evict last stay. `shifts[layer]` relates old and new slots:
    the memory of old slot `i` is that of new slot `i - shift`. It is None (in an array, `NOT_IN_LINE`) where no old
    slot lines up with a new one. Survivors keep their order by slot, and as many as can keep their place in memory.

    `in_order_where_all_fit` concerns layers with a slot for every expert. Such a layer is served fastest when each
    expert is in the slot of its own number (`queries.is_fully_resident`). So an expert survives there only if it can
    get that slot without a change of the order, and the caller fetches the rest again.

    The function changes nothing, and nothing may be pinned. Raises `ValueError` where `n_slots` or `shifts` do not have
    one number for each layer.
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
    columns = np.empty((4, len(residency.owner)), np.int32)
    n_survivors = residency.choose_survivors(
        n_slots, shifts, columns, in_order_where_all_fit=in_order_where_all_fit
    )
    assert n_survivors >= 0, "survivors are chosen while a slot is pinned"
    return Survivors(*columns[:, :n_survivors])
