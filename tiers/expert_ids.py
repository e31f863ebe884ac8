"""Expert numbers as callers give them."""

from __future__ import annotations

import operator
from collections.abc import Iterable

import numpy as np


def distinct(experts: Iterable[int]) -> list[int]:
    """Return the experts in the order of their first mention, as plain ints; `TypeError` for other things."""
    if isinstance(experts, np.ndarray):
        if experts.dtype.kind not in "iu" and experts.size:
            raise TypeError(f"experts must be integers, got an array of {experts.dtype}")
        return list(dict.fromkeys(experts.ravel().tolist()))
    return list(dict.fromkeys(operator.index(expert) for expert in experts))
