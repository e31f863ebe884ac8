"""Parts of the experts that stay in L1 while its slots move."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from expertier.planner.repack import Survivors

I64 = npt.NDArray[np.int64]


def some_of(kept: Survivors, chosen: npt.NDArray[np.bool_]) -> Survivors:
    """Return those that `chosen` marks."""
    return Survivors(kept.layer[chosen], kept.expert[chosen], kept.old_slot[chosen], kept.new_slot[chosen])


def in_place(kept: Survivors) -> Survivors:
    """Return the same experts in the slots that they have."""
    return Survivors(kept.layer, kept.expert, kept.old_slot, kept.old_slot)


def free_slots(kept: Survivors, slots: Sequence[int]) -> list[I64]:
    """Return for each layer the new slots that nobody has, where it has `slots[layer]` of them."""
    bounds = np.searchsorted(kept.layer, np.arange(len(slots) + 1))
    free = []
    for layer, n_slots in enumerate(slots):
        taken = np.zeros(n_slots, np.bool_)
        taken[kept.new_slot[bounds[layer] : bounds[layer + 1]]] = True
        free.append(np.flatnonzero(~taken))
    return free
