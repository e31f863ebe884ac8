"""Choices among the experts that stay in L1 while its slots move."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from expertier.planner.policy.repack import Survivors


def some_of(survivors: Survivors, chosen: npt.NDArray[np.bool_]) -> Survivors:
    """Return the survivors that `chosen`, a bool for each of them, marks."""
    return Survivors(
        survivors.layer[chosen],
        survivors.expert[chosen],
        survivors.old_slot[chosen],
        survivors.new_slot[chosen],
    )


def in_place(survivors: Survivors) -> Survivors:
    """Return the same experts, each staying in its old slot."""
    return Survivors(survivors.layer, survivors.expert, survivors.old_slot, survivors.old_slot)
