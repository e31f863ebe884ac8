"""Parts of the experts that stay in L1 while its slots move."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from expertier.planner.policy.repack import Survivors


def some_of(kept: Survivors, chosen: npt.NDArray[np.bool_]) -> Survivors:
    """Return those that `chosen` marks."""
    return Survivors(kept.layer[chosen], kept.expert[chosen], kept.old_slot[chosen], kept.new_slot[chosen])


def in_place(kept: Survivors) -> Survivors:
    """Return the same experts in the slots that they have."""
    return Survivors(kept.layer, kept.expert, kept.old_slot, kept.old_slot)
