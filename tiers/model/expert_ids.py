"""Checks expert numbers that a caller gives, and removes duplicates."""

from __future__ import annotations

import operator
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]

_INT32 = np.dtype(np.int32)


def distinct_array(experts: Iterable[int]) -> I32 | None:
    """Return a copy of `experts` where it is a 1-d int32 array without duplicates; None for anything else.

    This is the fast way for the usual case; `distinct` handles everything else.
    """
    if isinstance(experts, np.ndarray) and experts.dtype is _INT32 and experts.ndim == 1:
        numbers = experts.tolist()
        if len(set(numbers)) == len(numbers):
            return experts.copy()
    return None


def distinct(experts: Iterable[int]) -> list[int]:
    """Return the experts without duplicates, as ints in the order of their first mention.

    Raises `TypeError` for anything that is not an integer.
    """
    if isinstance(experts, np.ndarray):
        if experts.dtype.kind not in "iu" and experts.size:
            raise TypeError(f"experts must be integers, got an array of {experts.dtype}")
        return list(dict.fromkeys(experts.ravel().tolist()))
    return list(dict.fromkeys(operator.index(expert) for expert in experts))
